ALTER TABLE auth_chains
    ALTER COLUMN chain_nid DROP NOT NULL,
    ADD COLUMN link_1 bigint,
    ADD COLUMN link_2 bigint;
COMMENT ON TABLE auth_chains IS
    'Chain cover of the auth graph: each state event has a position in one chain, and reaches '
    'every earlier position of that chain. A link means: from this position on, the chain reaches '
    'the target chain up to the target position. Only links that extend earlier ones are stored. '
    'Read the rows of a chain by chain_rows, and its links by reached_from.';
COMMENT ON COLUMN auth_chains.chain_nid IS
    'The number of the chain: minus the nid of its first event, or, of chains that earlier '
    'releases began, a number of auth_chain_nids. NULL: the event is the first of a chain that '
    'has its number.';
COMMENT ON COLUMN auth_chains.link_1 IS
    'A link that begins here: in the upper 32 bits event_nid minus the nid of the first event of '
    'the target chain, in the lower ones the target position. NULL: none. A row of '
    'auth_chain_links and its index entries take 100 bytes.';
COMMENT ON COLUMN auth_chains.link_2 IS 'Another one. Further ones are in auth_chain_links.';
COMMENT ON CONSTRAINT auth_chains_pkey ON auth_chains IS
    'Serves: the position of an event; the first event of a chain; the ids of a state and of an '
    'auth chain.';
COMMENT ON INDEX auth_chains_position_key IS
    'Serves: the events of a range of a chain, without its first event. Most chains have no other.';
COMMENT ON TABLE auth_chain_links IS
    'Links that do not fit into auth_chains: the third of a position and further ones, links to '
    'chains that earlier releases began, and all links that those releases wrote.';

CREATE FUNCTION chain_rows(chain_nid bigint, upto int)
RETURNS TABLE (event_nid bigint, sequence_number int, event_id text, link_1 bigint, link_2 bigint)
LANGUAGE sql STABLE ROWS 4 AS $$
    SELECT a.event_nid, a.sequence_number, a.event_id, a.link_1, a.link_2
    FROM auth_chains a
    WHERE a.chain_nid = $1 AND a.sequence_number <= $2
    UNION ALL
    SELECT a.event_nid, a.sequence_number, a.event_id, a.link_1, a.link_2
    FROM auth_chains a
    WHERE a.event_nid = -$1 AND a.chain_nid IS NULL
$$;
COMMENT ON FUNCTION chain_rows IS
    'The rows of a chain up to a position, which is 1 or more. The first event of a chain that has '
    'its number is found by that.';

CREATE FUNCTION chain_rows_from(chain_nid bigint, place int)
RETURNS TABLE (event_nid bigint, sequence_number int, event_id text)
LANGUAGE sql STABLE ROWS 4 AS $$
    SELECT a.event_nid, a.sequence_number, a.event_id
    FROM auth_chains a
    WHERE a.chain_nid = $1 AND a.sequence_number >= $2
    UNION ALL
    SELECT a.event_nid, a.sequence_number, a.event_id
    FROM auth_chains a
    WHERE a.event_nid = -$1 AND a.chain_nid IS NULL AND $2 <= 1
$$;
COMMENT ON FUNCTION chain_rows_from IS 'The rows of a chain from a position on.';

CREATE FUNCTION linking_to(chain_nid bigint,
    sequence_number int) RETURNS TABLE (chain_nid_linking bigint, place int)
LANGUAGE sql STABLE ROWS 10 AS $$
    SELECT l.chain_nid, l.sequence_number
    FROM auth_chain_links l
    WHERE l.target_chain_nid = $1 AND l.target_sequence_number >= $2
    UNION ALL
    SELECT COALESCE(a.chain_nid, -a.event_nid), a.sequence_number
    FROM auth_chains a
    WHERE a.link_1 IS NOT NULL AND (a.link_1 >> 32) - a.event_nid = $1
        AND (a.link_1 & 4294967295) >= $2
    UNION ALL
    SELECT COALESCE(a.chain_nid, -a.event_nid), a.sequence_number
    FROM auth_chains a
    WHERE a.link_2 IS NOT NULL AND (a.link_2 >> 32) - a.event_nid = $1
        AND (a.link_2 & 4294967295) >= $2
$$;
COMMENT ON FUNCTION linking_to IS
    'The positions with a link to this position of a chain or to a later one.';

CREATE FUNCTION linked_upto(chain_nid bigint) RETURNS TABLE (upto int)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT GREATEST((
        SELECT max(l.target_sequence_number)
        FROM auth_chain_links l
        WHERE l.target_chain_nid = $1
    ), (
        SELECT max(a.link_1 & 4294967295)
        FROM auth_chains a
        WHERE a.link_1 IS NOT NULL AND (a.link_1 >> 32) - a.event_nid = $1
    ), (
        SELECT max(a.link_2 & 4294967295)
        FROM auth_chains a
        WHERE a.link_2 IS NOT NULL AND (a.link_2 >> 32) - a.event_nid = $1
    ))::int
$$;
COMMENT ON FUNCTION linked_upto IS
    'The last position of a chain that a link leads to. NULL: no link leads there.';

CREATE OR REPLACE FUNCTION reached_from(chain_nid bigint,
    sequence_number int) RETURNS TABLE (chain_nid_reached bigint, upto int)
LANGUAGE sql STABLE ROWS 10 AS $$
    SELECT l.chain_nid, max(l.upto)
    FROM (
        SELECT o.target_chain_nid, o.target_sequence_number
        FROM auth_chain_links o
        WHERE o.chain_nid = $1 AND o.sequence_number <= $2
        UNION ALL
        SELECT (i.link >> 32) - a.event_nid, (i.link & 4294967295)::int
        FROM chain_rows($1, $2) AS a
        CROSS JOIN LATERAL (VALUES (a.link_1), (a.link_2)) AS i (link)
        WHERE i.link IS NOT NULL
    ) AS l (chain_nid, upto)
    GROUP BY l.chain_nid
    OFFSET 0
$$;
