"""The inspector: a web application that shows the rooms of a store. It needs the extra `inspector`.

It shows the answers of the library, and decides nothing itself. `application` makes an ASGI
application: `room-storage inspect` serves one for its own machine, and a homeserver mounts one.

  application.py  `application`, `Inspector`: routes, and what all requests share; an error as a
                  page; one application on a port of this machine
  access.py       who may look: `Viewer`, `Access`, and access by a token; the headers of every
                  answer, among them the Content-Security-Policy
  visit.py        one request: its viewer, its parameters, its answer; new events, by server-sent
                  events
  rendering.py    the log of who looked at what; templates, in which every value is text
  text.py         hostile text made visible; numbers and times for people
  pages/           one file for each page
  actions/         what an operator may change, where writing is allowed
  templates/, static/   HTML, CSS and JavaScript; nothing is loaded from another host
"""

from storage.errors import ExtraMissing

try:
    from storage.inspector.access import Access, Viewer
    from storage.inspector.application import Inspector, application
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        str(ExtraMissing("the inspector", "inspector")), name=error.name
    ) from error

__all__ = ["Access", "Inspector", "Viewer", "application"]
