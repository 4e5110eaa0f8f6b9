"""What the site generator asks of this repository: the command line reference, made from the commands themselves."""

from __future__ import annotations

import click

from moelora_cli.main import cli

PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called for every page: puts the reference where a page asks for it."""
    return markdown.replace(PLACE, command_reference(cli)) if PLACE in markdown else markdown


def command_reference(group: click.Group) -> str:
    """Markdown of all commands: usage, description, and every argument and option with its sentence."""
    ctx = click.Context(group, info_name="moelora")
    return "\n\n".join(_command(group.commands[name], ctx) for name in sorted(group.commands))


def _command(command: click.Command, parent: click.Context) -> str:
    ctx = click.Context(command, info_name=command.name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(ctx))
    parts = [
        f"## moelora {command.name}",
        f"```text\n{ctx.command_path} {usage}\n```",
        click.unstyle(command.help or ""),
    ]
    options = [p for p in command.get_params(ctx) if isinstance(p, click.Option) and not p.hidden]
    return "\n\n".join(parts + [_option(option, ctx) for option in options])


def _option(option: click.Option, ctx: click.Context) -> str:
    """A term with the option and its value, and what it does."""
    value = "" if option.is_flag else " " + option.make_metavar(ctx)
    names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))
    extra = option.get_help_extra(ctx)
    facts = [f"default `{extra['default']}`"] if "default" in extra else []
    facts += ["required"] if option.required else []
    facts += [f"`{extra['range']}`"] if "range" in extra else []
    return f"{names}\n:   {option.help}" + (f" *({', '.join(facts)})*" if facts else "")
