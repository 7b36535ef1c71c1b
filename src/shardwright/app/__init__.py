"""The application: a demo model, data, the training command and its reports.

Everything here is a user of the library; nothing below this package imports it.
"""
