"""What is known of one rank: what was switched on, and where it is in a recovery."""

from __future__ import annotations

from dataclasses import dataclass

from mindio_tft_patch.protocol.messages import Plan


@dataclass
class Options:
    """What the caller of tft_init_processor has switched on, and what the environment says.

    stops_before_dump: TTP_STOP_CLEAN_BEFORE_DUMP; on for MindSpeed and MindSpeed-LLM.
    """

    rank: int = 0
    enable_uce: bool = False
    enable_arf: bool = False
    mindspore: bool = False
    stops_before_dump: bool = False
    phase_seconds: float = 180.0
    dump_seconds: float = 120.0


@dataclass
class Recovering:
    """What is known of the recovery that is going on.

    Attributes:
        plan: of the latest command.
        step: what tft_get_repair_step returns.
        no_rebuild: the clean callback has said that the model need not be rebuilt.
        loaded: step of the checkpoint that was loaded, as tft_report_load_ckpt_step says; None: none was.
        spread: a fault after which no rank's numbers can be trusted.
    """

    plan: Plan | None = None
    step: int = 0
    no_rebuild: bool = False
    loaded: int | None = None
    spread: bool = False
    memory_fault: bool = False
    stops_asked: int = 0
    stops_answered: int = 0
