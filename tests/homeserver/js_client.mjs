// matrix-js-sdk with its sliding sync, as a process. The test gives the folder of the package, the
// server, and a user. Each command is a line of JSON on standard input, each result one on standard
// output. Messages that arrive are results, too.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

for (const level of ["trace", "debug", "log", "info", "warn"]) console[level] = () => {};
const [folder, baseUrl, user, password] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(createRequire(`${folder}/`).resolve(name)));
const sdk = await load("matrix-js-sdk");
const { SlidingSync, SlidingSyncEvent, SlidingSyncState } = await load(
    "matrix-js-sdk/lib/sliding-sync.js",
);

const tell = (result) => process.stdout.write(`${JSON.stringify(result)}\n`);
const bodies = (events) => events.map((one) => one.getContent().body).filter(Boolean);
const required_state = [
    ["m.room.create", ""],
    ["m.room.name", ""],
    ["m.room.member", "$LAZY"],
];

const { user_id, access_token, device_id } = await sdk
    .createClient({ baseUrl })
    .loginRequest({ type: "m.login.password", identifier: { type: "m.id.user", user }, password });
const client = sdk.createClient({ baseUrl, accessToken: access_token, userId: user_id, deviceId: device_id });
const list = { ranges: [[0, 19]], timeline_limit: 3, required_state };
const sync = new SlidingSync(baseUrl, new Map([["all", list]]), { required_state, timeline_limit: 5 }, client, 20_000);

const commands = {
    rooms: async () =>
        client.getRooms().map((room) => ({
            room_id: room.roomId,
            name: room.name,
            membership: room.getMyMembership(),
            members: room.getJoinedMemberCount(),
            bodies: bodies(room.getLiveTimeline().getEvents()),
        })),
    count: async () => sync.getListData("all").joinedCount,
    page: async ({ room_id, limit }) => {
        const room = client.getRoom(room_id);
        const before = room.getLiveTimeline().getEvents().length;
        await client.scrollback(room, limit);
        const events = room.getLiveTimeline().getEvents();
        return bodies(events.slice(0, events.length - before));
    },
    send: async ({ room_id, body }) => (await client.sendTextMessage(room_id, body)).event_id,
    join: async ({ room_id }) => (await client.joinRoom(room_id)).roomId,
};

client.on(sdk.RoomEvent.Timeline, (event, room, toStart, _removed, data) => {
    if (data.liveEvent && !toStart && event.getContent().body) {
        tell({ live: event.getContent().body, room_id: room.roomId, sender: event.getSender() });
    }
});
await new Promise((resolve) => {
    sync.on(SlidingSyncEvent.Lifecycle, (state, _, error) => {
        if (error) tell({ error: String(error) });
        if (state === SlidingSyncState.Complete) resolve();
    });
    client.startClient({ slidingSync: sync });
});
tell({ ready: user_id });
for await (const line of createInterface({ input: process.stdin })) {
    const { command, ...given } = JSON.parse(line);
    try {
        tell({ result: await commands[command](given) });
    } catch (error) {
        tell({ error: String(error) });
    }
}
process.exit(0);
