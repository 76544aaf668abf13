"""The commands, in the order in which a new user needs them."""

import inspect
from importlib.metadata import entry_points

import typer

from coterie.cli import (
    advise,
    audit,
    check,
    compare,
    deploy,
    explain,
    export,
    list_,
    place,
    plan,
    predict,
    recheck,
    report,
    resume,
    run,
    show,
    verdict,
    watch,
    why,
)

app = typer.Typer(
    help="Find groups of similar clients in a federation, and train a model for each group.",
    epilog="Start here: coterie run quickstart",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(advise.advise)
app.command()(run.run)
app.command()(plan.plan)
app.command()(resume.resume)
app.command()(watch.watch)
app.command()(show.show)
app.command()(report.report)
app.command()(verdict.verdict)
app.command()(why.why)
app.command()(compare.compare)
app.command()(audit.audit)
app.command()(place.place)
app.command()(recheck.recheck)
app.command()(predict.predict)
app.command()(export.export)
app.command("list")(list_.list_)
app.command()(explain.explain)
app.command()(check.check)
for _entry in entry_points(group="coterie.commands"):  # of other packages
    _entry.load()(app)
app.add_typer(deploy.app, name="deploy")


def _join_lines(commands: typer.Typer | None) -> None:
    """Let the terminal break the lines of help texts: Typer keeps the breaks of the docstrings."""
    if commands is None:
        return
    for command in commands.registered_commands:
        parts = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(
            part if part.startswith(" ") else part.replace("\n", " ") for part in parts
        )
    for group in commands.registered_groups:
        _join_lines(group.typer_instance)


_join_lines(app)


def _version(wanted: bool) -> None:
    if wanted:
        from coterie import __version__

        print(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass
