"""Every architecture of the zoo, in the order of the table."""

from __future__ import annotations

from . import several, sound, text, vision

ENTRIES = [*text.ENTRIES, *vision.ENTRIES, *sound.ENTRIES, *several.ENTRIES]
