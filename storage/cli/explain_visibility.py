"""`room-storage explain-visibility`: explain why an event is visible to somebody, or is not."""

from dataclasses import asdict
from typing import Annotated

import typer

from storage import arguments as args
from storage.cli.common import DsnOption, JsonOption, maintained
from storage.cli.interrupt import run
from storage.cli.output import print_json
from storage.ids import EventId
from storage.maintenance.local_server import local_server_name
from storage.queries.explain_visibility import Explanation, explain_visibility


def command(
    event_id: Annotated[
        str, typer.Argument(metavar="EVENT_ID", help="The event.", show_default=False)
    ],
    user_or_server: Annotated[
        str,
        typer.Argument(
            metavar="USER_OR_SERVER",
            help="A user id, such as @alice:example.org, or a server name.",
            show_default=False,
        ),
    ],
    dsn: DsnOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Explain in a sentence why a user, or a server, may see an event or may not."""
    explanation = run(_explain(dsn, event_id, user_or_server))
    if as_json:
        print_json(asdict(explanation))
    else:
        typer.echo(explanation.sentence)


async def _explain(dsn: str | None, event_id: str, user_or_server: str) -> Explanation:
    [checked_id] = args.events([event_id])
    async with maintained(dsn) as database:
        if user_or_server.startswith("@"):
            args.local_user(user_or_server, await local_server_name(database))
        else:
            args.server(user_or_server)
        async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
            return await explain_visibility(conn, EventId(checked_id), user_or_server)
