"""A database remembers whose it is, and lets nobody else in."""

import asyncio
from contextlib import AsyncExitStack

import asyncpg
import pytest

import storage
from storage import InputError, Store, WrongServerName
from storage.database import Database
from storage.database import deployment as module
from storage.database.deployment import deployment
from storage.ids import UserId
from storage.testing import RoomBuilder, signing_key
from tests.cli.running import room_storage

IMPATIENT = storage.Config(enter_wait_ms=50)


async def remembered(dsn: str) -> str | None:
    async with await Database.open(dsn) as database, database.connection() as conn:
        found = await deployment(conn)
        return None if found is None else found.server_name


async def test_the_first_store_sets_the_name_and_another_one_is_refused(dsn: str) -> None:
    with pytest.raises(InputError, match="give a server name"):
        async with storage.open(dsn):
            pass
    async with storage.open(dsn, server_name="s1.test") as store:
        deployment_id = store.deployment_id
        await store.create_room("@alice:s1.test", signing_key=signing_key("s1.test"))
    with pytest.raises(
        WrongServerName,
        match=r"the database \w+ \(schema public\) belongs to s1\.test, not to s2\.test: "
        r"open it as s1\.test, or another database",
    ) as caught:
        async with storage.open(dsn, server_name="s2.test"):
            pass
    assert (caught.value.server_name, caught.value.found) == ("s2.test", "s1.test")
    async with storage.open(dsn) as again:
        assert (again.server_name, again.deployment_id) == ("s1.test", deployment_id)


async def test_a_wrong_name_of_an_empty_database_can_be_corrected(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with storage.open(dsn, server_name="s1.tset"):
        pass
    async with storage.open(dsn, server_name="s1.test") as store:
        assert store.server_name == "s1.test"
        assert "it belongs to s1.test now, not s1.tset" in caplog.text
        room = RoomBuilder("11")
        room.start("@alice:s1.test")
        await store.append(room.pdus)
        assert list((await store.sync("@alice:s1.test")).join) == [room.room_id]
    assert await remembered(dsn) == "s1.test"
    with pytest.raises(
        WrongServerName, match=r"belongs to s1\.test, not to s1\.tset: open it as s1\.test"
    ):
        async with storage.open(dsn, server_name="s1.tset"):
            pass


@pytest.mark.parametrize("table", ["account_data", "to_device", "erased_users"])
async def test_a_database_with_data_of_users_keeps_its_name(dsn: str, table: str) -> None:
    alice = UserId("@alice:s1.test")
    async with storage.open(dsn, server_name="s1.test") as store:
        match table:
            case "account_data":
                await store.account_data.set(alice, "m.direct", {})
            case "to_device":
                await store.to_device.send({alice: {"DEVICE": {"type": "m.dummy"}}})
            case _:
                await store.erase_user(alice)
    with pytest.raises(WrongServerName):
        async with storage.open(dsn, server_name="s2.test"):
            pass


async def test_a_name_is_not_taken_from_a_store_that_is_open(dsn: str) -> None:
    async with storage.open(dsn, server_name="s1.test") as store:
        with pytest.raises(WrongServerName):
            async with storage.open(
                dsn, server_name="s2.test", instance_name="two", config=IMPATIENT
            ):
                pass
        await store.append([])
    assert await remembered(dsn) == "s1.test"


async def test_a_store_that_nobody_saw_writes_nothing_under_the_old_name(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a pooler, sessions have the names of other processes."""
    room = RoomBuilder("11")
    room.start("@alice:s1.test")
    async with storage.open(dsn, server_name="s1.test") as store:
        monkeypatch.setattr(module, "SQL_IN_USE", "SELECT false")
        async with storage.open(dsn, server_name="s2.test", instance_name="two"):
            pass
        with pytest.raises(storage.InstanceNameTaken):
            await store.append(room.pdus)
        assert await store.event(room.events[0].event_id) is None


async def test_of_many_that_open_at_once_one_name_wins(dsn: str) -> None:
    async with AsyncExitStack() as stack:

        async def opened(number: int) -> Store:
            name = f"w{number}"
            return await stack.enter_async_context(
                storage.open(
                    dsn,
                    server_name=f"s{number % 2}.test",
                    instance_name=name,
                    config=IMPATIENT,
                )
            )

        found = await asyncio.gather(*map(opened, range(8)), return_exceptions=True)
        stores = [one for one in found if isinstance(one, Store)]
        [name] = {store.server_name for store in stores}
        assert len({store.deployment_id for store in stores}) == 1
        refused = [one for one in found if not isinstance(one, Store)]
        assert [type(one) for one in refused] == [WrongServerName] * 4
        assert name == await remembered(dsn)


async def test_commands_take_the_name_from_the_database(dsn: str) -> None:
    room = RoomBuilder("11")
    room.start("@alice:s1.test")
    lines = b"".join(pdu + b"\n" for pdu in room.pdus)
    new = room_storage("serve", "--dsn", dsn)
    assert (new.returncode, "give a server name" in new.stderr) == (2, True)
    async with storage.open(dsn, server_name="s1.test"):
        pass
    done = room_storage("import", "-", "--dsn", dsn, given=lines)
    assert (done.returncode, done.stderr) == (0, "")
    async with storage.open(dsn) as store:
        assert list((await store.sync("@alice:s1.test")).join) == [room.room_id]
    for arguments in (["import", "-"], ["serve"], ["verify"], ["rebuild-visibility", room.room_id]):
        done = room_storage(*arguments, "--dsn", dsn, "--server-name", "s2.test", given=lines)
        assert (done.returncode, "open it as s1.test" in done.stderr) == (2, True), done


async def test_an_import_without_a_name_leaves_the_choice_open(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    room = RoomBuilder("11")
    alice = UserId("@alice:s1.test")
    room.start(alice)
    done = room_storage(
        *("import", "-", "--dsn", dsn, "--no-local-users"),
        given=b"".join(pdu + b"\n" for pdu in room.pdus),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert await remembered(dsn) is None
    async with storage.open(dsn, server_name="s1.test") as store:
        assert await store.rooms_of(alice) == []
    assert "verify --repair" in caplog.text
    assert await remembered(dsn) == "s1.test"
    room_storage("verify", "--repair", "--dsn", dsn)
    async with storage.open(dsn) as store:
        assert list((await store.sync(alice)).join) == [room.room_id]


async def test_a_database_in_which_nobody_has_ever_opened_a_store(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    assert await connection.fetchval("SELECT count(*) FROM deployment") == 0
    await connection.close()
    assert await remembered(dsn) is None
