"""What a rank learns from the others while Megatron sets the job up, for a process that sets itself up alone.

Rank 0 broadcasts whether there is anything to train on, to validate and to test with; only ranks that read data know by
themselves. All ranks agree on the number of evaluation steps when a whole validation set is used.
"""

from __future__ import annotations

import json
from typing import Any

_KEY = "setup_facts"
_NAMES = ("do_train", "do_valid", "do_test", "eval_iters")


def publish(store: Any, args: Any) -> None:
    """Leave the facts in the job's store; on one rank, which knows them all."""
    store.set(_KEY, json.dumps({name: getattr(args, name, None) for name in _NAMES}))


def adopt(store: Any, args: Any) -> None:
    """Take the facts over into Megatron's arguments."""
    for name, value in json.loads(store.get(_KEY)).items():
        if value is not None:
            setattr(args, name, value)
