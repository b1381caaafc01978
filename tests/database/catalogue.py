"""Everything the catalogue says of a schema, as text, so that two databases can be compared."""

from typing import Final

import asyncpg

QUERIES: Final = {
    "tables": "SELECT format('%s %s %s', c.relname, c.relkind, c.reloptions) FROM pg_class c"
    " WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm')",
    "columns": "SELECT format('%s.%s %s %s null=%s collation=%s storage=%s identity=%s default=%s',"
    " c.relname, (SELECT count(*) FROM pg_attribute b WHERE b.attrelid = a.attrelid"
    "  AND b.attnum BETWEEN 1 AND a.attnum AND NOT b.attisdropped), a.attname,"
    "  format_type(a.atttypid, a.atttypmod), NOT a.attnotnull, o.collname, a.attstorage,"
    " a.attidentity, pg_get_expr(d.adbin, d.adrelid))"
    " FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
    " LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum"
    " LEFT JOIN pg_collation o ON o.oid = a.attcollation"
    " WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm')"
    " AND a.attnum > 0 AND NOT a.attisdropped",
    "constraints": "SELECT format('%s %s %s', conrelid::regclass, conname,"
    " pg_get_constraintdef(oid)) FROM pg_constraint"
    " WHERE connamespace = 'public'::regnamespace",
    "indexes": "SELECT format('%s %s', indexdef, c.reloptions) FROM pg_indexes"
    " JOIN pg_class c ON c.relname = indexname AND c.relnamespace = 'public'::regnamespace"
    " WHERE schemaname = 'public'",
    "sequences": "SELECT format('%s %s %s %s %s %s',"
    " sequencename, data_type, start_value, increment_by, max_value, cycle)"
    " FROM pg_sequences WHERE schemaname = 'public'",
    "functions": "SELECT pg_get_functiondef(oid) FROM pg_proc"
    " WHERE pronamespace = 'public'::regnamespace AND prokind <> 'a'",
    "triggers": "SELECT pg_get_triggerdef(t.oid) FROM pg_trigger t WHERE NOT tgisinternal",
    "types": "SELECT format('%s %s', typname, typtype) FROM pg_type"
    " WHERE typnamespace = 'public'::regnamespace AND typtype IN ('e', 'd')",
    "comments": "SELECT format('%s: %s', pg_describe_object(classoid, objoid, objsubid),"
    " description) FROM pg_description"
    " WHERE (pg_identify_object(classoid, objoid, objsubid)).schema = 'public'"
    "    OR (pg_identify_object(classoid, objoid, objsubid)).identity LIKE '% on public.%'",
    "privileges": "SELECT format('%s %s', relname,"
    " ARRAY(SELECT a::text FROM unnest(relacl) AS a ORDER BY 1)) FROM pg_class"
    " WHERE relnamespace = 'public'::regnamespace AND relacl IS NOT NULL"
    " UNION ALL SELECT format('%s.%s %s', c.relname, a.attname,"
    " ARRAY(SELECT one::text FROM unnest(a.attacl) AS one ORDER BY 1))"
    " FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
    " WHERE c.relnamespace = 'public'::regnamespace AND a.attacl IS NOT NULL",
}
"""Each row is one object; rows of alembic's own table are left out."""

TABLES: Final = (
    "SELECT relname FROM pg_class"
    " WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' ORDER BY 1"
)


async def catalogue_of(dsn: str) -> dict[str, list[str]]:
    """Kind of object to the sorted descriptions of all objects; `rows` has what the tables hold."""
    connection = await asyncpg.connect(dsn)
    try:
        found = {
            kind: sorted(
                record[0]
                for record in await connection.fetch(query)
                if "alembic_version" not in record[0]
            )
            for kind, query in QUERIES.items()
        }
        tables = [
            record[0] for record in await connection.fetch(TABLES) if record[0] != "alembic_version"
        ]
        found["rows"] = [
            f"{table} {record[0]}"
            for table in tables
            for record in await connection.fetch(f"SELECT t::text FROM {table} t ORDER BY 1")
        ]
    finally:
        await connection.close()
    return found
