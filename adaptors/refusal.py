"""Hands the reason of a refusal to the launcher, so that it is the last thing that the user reads.

torchelastic gives every rank the path of an error file and shows what the first failed rank has written there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def tell_launcher(reason: str, environ: Mapping[str, str] | None = None) -> None:
    """Write the reason into the rank's error file, where there is one; never raises."""
    path = (os.environ if environ is None else environ).get(_ERROR_FILE)
    if not path:
        return
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": reason, "timestamp": int(time.time())}, file)
