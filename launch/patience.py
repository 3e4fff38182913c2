"""Patience for plain `torchrun`: survivors get TTP_OT seconds for the dump instead of 30.

When a rank dies, torchrun sends SIGTERM to the others and, 30 seconds later, SIGKILL. With

    import mindio_tft_patch

in front of `from torch.distributed.run import main` in the torchrun script, they get TTP_OT. `ttprun` needs none of
this: it sends nothing at all while the survivors write.
"""

from __future__ import annotations

import logging
from typing import Any

import wrapt

from mindio_tft_patch.config import Config

log = logging.getLogger("mindio_tft_patch.launch")

_MARK = "_mindio_tft_patience"


def lengthen_patience(config: Config) -> bool:
    """Let torchelastic wait at least TTP_OT between SIGTERM and SIGKILL. Call it in torchrun's process only.

    Returns:
        True when patience was lengthened now; False when it already was.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    if getattr(PContext, _MARK, False):
        return False
    patience_seconds = config.dump_timeout_seconds

    def patient(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def close(death_sig: Any = None, timeout: float = 30) -> Any:
            return wrapped(death_sig, max(timeout, patience_seconds))

        return close(*args, **kwargs)

    PContext.close = wrapt.FunctionWrapper(PContext.close, patient)
    setattr(PContext, _MARK, True)
    log.info("torchrun leaves ranks %g s between SIGTERM and SIGKILL", patience_seconds)
    return True
