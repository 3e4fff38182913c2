"""One rank of the Megatron-LM of 2023 under protection."""

from __future__ import annotations

from mindio_tft_patch.adaptors.megatron.session import Session
from mindio_tft_patch.adaptors.megatron_legacy.handlers import LegacyHandlers
from mindio_tft_patch.adaptors.megatron_legacy.in_place import LegacyInPlace


class LegacySession(Session):
    """adaptors.megatron.session.Session, with the parts that are different."""

    handlers_type = LegacyHandlers
    in_place_type = LegacyInPlace
