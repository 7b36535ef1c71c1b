"""The `shardwright` command: one file per sub-command, collected here.

Importing this package, asking for help and refusing bad input load no torch: a sub-command imports
what it runs inside its function. Errors of ours go to stderr as plain lines: exit code 2 for wrong
settings, 1 for everything else. A reader that closes the output early, such as `head`, ends the
command without a word.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardwright import __version__
from shardwright.app.cli.errors import print_error
from shardwright.app.cli.plan import plan
from shardwright.app.cli.train import train
from shardwright.app.cli.validate import validate
from shardwright.core.errors import ShardwrightError

__all__ = ["app", "main"]

app = typer.Typer(
    name="shardwright",
    help="Train PyTorch models whose training state does not fit on one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"shardwright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.command("plan")(plan)
app.command("train")(train)
app.command("validate")(validate)


def main() -> None:
    """Run the command line; the entry point of the installed script."""
    try:
        app()
    except ShardwrightError as error:
        sys.exit(print_error(error))
