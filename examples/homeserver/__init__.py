"""A small Matrix homeserver on `storage`: what is left for a homeserver's author to write."""
