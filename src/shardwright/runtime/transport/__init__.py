"""The one seam through which bytes leave a rank; see `base`."""
