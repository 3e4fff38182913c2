"""The Megatron-LM of 2023: what is refused before training, and iterators whose place can be changed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mindio_tft_patch.adaptors.megatron_legacy.data import replaceable
from mindio_tft_patch.adaptors.megatron_legacy.newer_names import complete_arguments
from mindio_tft_patch.adaptors.megatron_legacy.validate import prepare
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError


def arguments(folder: Path, **changes: Any) -> Namespace:
    """As that Megatron's validate_args leaves them; the names are all it has of those that are looked at."""
    given = {
        "data_parallel_size": 4,
        "use_distributed_optimizer": True,
        "save": str(folder / "save"),
        "save_interval": 100,
        "optimizer": "adam",
        "data_parallel_random_init": False,
        "vision_pretraining": False,
        "adlr_autoresume": False,
        "lazy_mpu_init": None,
    }
    return Namespace(**{**given, **changes})


def test_what_can_work_is_let_through_and_gets_the_counters_that_came_later(tmp_path: Path) -> None:
    made = arguments(tmp_path)
    prepare(made, Config(high_availability=True, hbmfault_repair=True))
    assert made.enable_high_availability and made.enable_hbmfault_repair and not made.enable_worker_reboot
    assert made.skipped_train_samples == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_parallel_size": 1}, "--distributed-optimizer-no-replica"),
        ({"data_parallel_size": 3}, "not divisible by the 2 copies"),
        ({"vision_pretraining": True}, "--vision-pretraining"),
        ({"adlr_autoresume": True}, "--adlr-autoresume"),
        ({"lazy_mpu_init": True}, "--lazy-mpu-init"),
        ({"save": None}, "--save"),
    ],
)
def test_what_cannot_work_is_refused_with_the_flag_to_change(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(arguments(tmp_path, **changes), Config(high_availability=True))


def test_random_starts_that_differ_between_ranks_do_not_go_with_recovery_in_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-parallel-random-init"):
        prepare(arguments(tmp_path, data_parallel_random_init=True), Config(high_availability=True, worker_reboot=True))


def test_what_an_argument_is_already_is_kept() -> None:
    made = Namespace(num_experts=8)
    complete_arguments(made)
    assert (made.num_experts, made.context_parallel_size) == (8, 1)


def test_an_iterator_goes_on_with_what_takes_the_place_of_its_source() -> None:
    train, valid = replaceable((iter([1, 2]), None))
    assert next(train) == 1 and valid is None
    train.iterable = iter([7])
    assert list(train) == [7]
