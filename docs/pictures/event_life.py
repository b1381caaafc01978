"""The life of an event: the outcomes of an append, and what can follow."""

from docs.pictures.canvas import AMBER, BLUE, GREY, MUTED, RED, TEAL, VIOLET, Canvas


def draw() -> Canvas:
    """Return the states of an event and the transitions between them."""
    canvas = Canvas(760, 560, "The life of an event, from its bytes to its purge")
    bytes_ = canvas.box(300, 20, 160, 44, "bytes of a PDU")
    checked = canvas.box(290, 110, 180, 60, "checked", ["form, hash, signatures"], tone=BLUE)
    canvas.box(40, 118, 150, 44, "invalid", tone=RED)
    canvas.box(570, 112, 170, 56, "missing_parents", ["nothing is stored"], tone=GREY)
    canvas.box(570, 226, 170, 60, "outlier", ["stored, not in the", "timeline"], tone=GREY)
    decided = canvas.box(290, 226, 180, 60, "authorised", ["three checks"], tone=BLUE)
    canvas.box(40, 226, 150, 60, "rejected", ["kept, never shown"], tone=RED)
    canvas.box(40, 330, 150, 60, "soft_failed", ["kept, served to", "other servers"], tone=AMBER)
    stored = canvas.box(290, 340, 180, 60, "stored", ["order, state, audience"], tone=TEAL)
    redacted = canvas.box(290, 440, 180, 44, "redacted", ["pruned when read"], tone=VIOLET)
    canvas.box(40, 440, 150, 44, "censored", ["content deleted"], tone=VIOLET)
    canvas.box(570, 440, 170, 44, "purged", ["a gap remains"], tone=GREY)
    canvas.arrow(bytes_.bottom, (380, 102))
    canvas.arrow(checked.left, (198, 140))
    canvas.arrow(checked.right, (562, 140))
    canvas.text(520, 132, "parents unknown", size=11.5, anchor="middle", fill=MUTED)
    canvas.arrow(checked.bottom, (380, 218))
    canvas.arrow((450, 170), (562, 236))
    canvas.text(520, 196, 'origin "outlier"', size=11.5, fill=MUTED)
    canvas.arrow(decided.left, (198, 256))
    canvas.text(244, 249, "auth events", size=11.5, anchor="middle", fill=MUTED)
    canvas.arrow((300, 286), (198, 346))
    canvas.text(262, 330, "current state", size=11.5, fill=MUTED)
    canvas.arrow(decided.bottom, (380, 332))
    canvas.arrow((570, 262), (478, 262))
    canvas.text(524, 278, "arrives again", size=11.5, anchor="middle", fill=MUTED)
    canvas.arrow((720, 112), (720, 84), (430, 84), (430, 102), dashed=True)
    canvas.text(712, 78, "sent again with its parents", size=11.5, anchor="end", fill=MUTED)
    canvas.arrow(stored.bottom, (380, 432))
    canvas.text(388, 424, "a redaction is accepted", size=11.5, fill=MUTED)
    canvas.arrow(redacted.left, (198, 462))
    canvas.arrow(stored.right, (655, 370), (655, 432))
    canvas.text(560, 362, "purge, retention", size=11.5, anchor="middle", fill=MUTED)
    canvas.arrow(redacted.right, (562, 462))
    canvas.caption(
        520,
        "The received bytes of a stored event never change. Censoring deletes redacted content.",
        "A purge deletes events. A backfilled event takes its old number if anything refers to it.",
    )
    return canvas
