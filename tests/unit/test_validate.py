"""What is refused before training, and what only gets a warning."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import Any

import pytest

from mindio_tft_patch.adaptors.megatron import arguments, validate
from mindio_tft_patch.adaptors.megatron.validate import Facts, Finding, Severity
from mindio_tft_patch.config import (
    ELASTIC_FLAG,
    FEATURE_FLAGS,
    HBM_FLAG,
    MASTER_FLAG,
    NO_REPLICA_FLAG,
    REBOOT_FLAG,
    Config,
)
from mindio_tft_patch.errors import ConfigError

GOOD = Facts()
NO_REPLICA = Facts(flags=frozenset({MASTER_FLAG, NO_REPLICA_FLAG}), copies=1)


def errors(facts: Facts) -> list[Finding]:
    return [finding for finding in validate.check(facts) if finding.severity is Severity.ERROR]


def warnings(facts: Facts) -> list[Finding]:
    return [finding for finding in validate.check(facts) if finding.severity is Severity.WARNING]


def only_error(facts: Facts) -> Finding:
    (finding,) = errors(facts)
    return finding


def test_an_ordinary_job_has_no_findings() -> None:
    assert validate.check(GOOD) == []
    assert validate.check(replace(GOOD, dense_size=8, expert_size=4)) == []


def test_a_job_without_any_flag_is_never_refused() -> None:
    assert validate.check(Facts(flags=frozenset(), dense_size=1, save=None)) == []


def test_every_finding_says_what_to_change() -> None:
    bad = Facts(
        flags=frozenset(FEATURE_FLAGS),
        dense_size=3,
        expert_size=1,
        save=None,
        lacks_einops=True,
        options=tuple((name, True) for name in validate.REFUSED),
    )
    found = validate.check(bad)
    assert len(found) > len(validate.REFUSED) + 4
    assert all(finding.message and finding.change for finding in found)


def test_errors_come_before_warnings() -> None:
    found = validate.check(replace(GOOD, save=None, options=(("async_save", True),)))
    assert [finding.severity for finding in found] == [Severity.ERROR, Severity.WARNING]


@pytest.mark.parametrize("flag", [HBM_FLAG, REBOOT_FLAG, NO_REPLICA_FLAG])
def test_a_feature_without_the_master_switch_is_refused(flag: str) -> None:
    finding = only_error(replace(GOOD, flags=frozenset({flag})))
    assert flag in finding.message
    assert MASTER_FLAG in finding.change


@pytest.mark.parametrize(
    ("dense", "expert", "words"),
    [(1, None, "data-parallel size"), (2, 1, "expert data-parallel size"), (4, 1, "expert data-parallel size")],
)
def test_a_single_holder_is_refused(dense: int, expert: int | None, words: str) -> None:
    finding = only_error(replace(GOOD, dense_size=dense, expert_size=expert))
    assert words in finding.message
    assert "is 1" in finding.message
    assert NO_REPLICA_FLAG in finding.change


@pytest.mark.parametrize(("dense", "expert", "copies"), [(3, None, 2), (4, None, 3), (6, 3, 2), (4, 2, 4)])
def test_sizes_that_the_copies_do_not_divide_are_refused(dense: int, expert: int | None, copies: int) -> None:
    found = errors(replace(GOOD, dense_size=dense, expert_size=expert, copies=copies))
    assert found
    assert all("not divisible" in finding.message for finding in found)


def test_sizes_do_not_matter_without_replicas() -> None:
    assert errors(replace(NO_REPLICA, dense_size=1)) == []
    assert errors(replace(NO_REPLICA, dense_size=3, expert_size=1)) == []


def test_without_a_distributed_optimizer_any_size_from_two_works() -> None:
    assert errors(replace(GOOD, distributed_optimizer=False, dense_size=3)) == []
    assert errors(replace(GOOD, distributed_optimizer=False, dense_size=1))


def test_the_users_own_number_of_instances_counts() -> None:
    assert replace(GOOD, user_instances=4).effective_copies == 4
    assert errors(replace(GOOD, dense_size=6, user_instances=4))
    assert not errors(replace(GOOD, dense_size=6, user_instances=3))


def test_no_replica_says_what_still_works() -> None:
    (finding,) = warnings(NO_REPLICA)
    assert "periodic checkpoint" in finding.message


def test_no_replica_needs_periodic_checkpoints() -> None:
    assert "--save-interval" in only_error(replace(NO_REPLICA, save_interval=None)).change


def test_a_job_must_have_somewhere_to_save() -> None:
    assert "--save" in only_error(replace(GOOD, save=None)).change


@pytest.mark.parametrize("name", list(validate.REFUSED))
def test_every_refused_option_names_its_flag(name: str) -> None:
    finding = only_error(replace(GOOD, options=((name, True),)))
    assert validate.REFUSED[name][0] in finding.change


@pytest.mark.parametrize("form", ["torch_dcp", "fsdp_dtensor", "zarr"])
def test_other_checkpoint_formats_are_refused(form: str) -> None:
    assert "torch_dist" in only_error(replace(GOOD, options=(("ckpt_format", form),))).change


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_the_two_formats_are_served(form: str) -> None:
    assert validate.check(replace(GOOD, options=(("ckpt_format", form),))) == []


def test_muon_is_refused_once() -> None:
    options = (("optimizer", "dist_muon"), ("use_layer_wise_distributed_optimizer", True))
    assert only_error(replace(GOOD, options=options))
    assert only_error(replace(GOOD, options=(("optimizer", "muon"),)))


def test_sharded_weights_do_not_go_with_copies() -> None:
    facts = replace(GOOD, options=(("gtp_weight_remat_size", 2),))
    assert NO_REPLICA_FLAG in only_error(facts).change


def test_a_missing_package_is_named() -> None:
    assert "einops" in only_error(replace(GOOD, lacks_einops=True)).change
    assert errors(replace(NO_REPLICA, lacks_einops=True)) == []


def test_elastic_training_is_refused() -> None:
    assert ELASTIC_FLAG in only_error(replace(GOOD, flags=frozenset({MASTER_FLAG, ELASTIC_FLAG}))).change


@pytest.mark.parametrize("flag", [HBM_FLAG, REBOOT_FLAG])
def test_repair_in_place_needs_generators_that_are_the_same_on_all_holders(flag: str) -> None:
    facts = replace(GOOD, flags=frozenset({MASTER_FLAG, flag}))
    assert errors(facts) == [] and warnings(facts) == []
    options = (("data_parallel_random_init", True),)
    assert "--data-parallel-random-init" in only_error(replace(facts, options=options)).change
    assert errors(replace(GOOD, options=options)) == []


@pytest.mark.parametrize("name", ["async_save", "log_params_norm"])
def test_limits_are_warned_of(name: str) -> None:
    assert len(warnings(replace(GOOD, options=((name, True),)))) == 1


@pytest.mark.parametrize("flag", [REBOOT_FLAG, NO_REPLICA_FLAG])
def test_data_of_a_foreign_loader_is_warned_of_where_it_would_have_to_be_read_again(flag: str) -> None:
    facts = replace(GOOD, flags=frozenset({MASTER_FLAG, flag}), options=(("dataloader_type", "external"),))
    assert any("--dataloader-type external" in one.message and flag in one.message for one in warnings(facts))
    assert warnings(replace(facts, flags=frozenset({MASTER_FLAG, HBM_FLAG}))) == []
    assert not any(
        "dataloader" in one.message for one in warnings(replace(facts, options=(("dataloader_type", "cyclic"),)))
    )


def test_all_errors_are_raised_at_once() -> None:
    with pytest.raises(ConfigError) as problem:
        validate.raise_errors(validate.check(replace(GOOD, dense_size=1, save=None)))
    assert "--save" in str(problem.value)
    assert "data-parallel size" in str(problem.value)


def megatron_arguments(**changed: Any) -> Namespace:
    values: dict[str, Any] = {
        "world_size": 16,
        "data_parallel_size": 4,
        "context_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": None,
        "num_experts": None,
        "use_distributed_optimizer": True,
        "num_distributed_optimizer_instances": 1,
        "save": "checkpoints",
        "save_interval": 10,
        **changed,
    }
    return Namespace(**values)


def test_facts_count_context_parallelism_and_experts() -> None:
    config = Config(high_availability=True)
    assert validate.facts_of(megatron_arguments(), config).dense_size == 8
    assert validate.facts_of(megatron_arguments(), config).expert_size is None
    assert validate.facts_of(megatron_arguments(num_experts=4), config).expert_size == 4
    assert validate.facts_of(megatron_arguments(num_experts=4, expert_tensor_parallel_size=1), config).expert_size == 8


def test_the_hook_switches_the_layout_on() -> None:
    given = megatron_arguments()
    validate.prepare(given, Config(high_availability=True))
    assert given.num_distributed_optimizer_instances == 2
    assert given.enable_high_availability is True


@pytest.mark.parametrize(
    ("changed", "config", "instances"),
    [
        ({}, Config(high_availability=True, no_replica=True), 1),
        ({"num_distributed_optimizer_instances": 4}, Config(high_availability=True), 4),
        ({"use_distributed_optimizer": False}, Config(high_availability=True), 1),
        ({}, Config(high_availability=True, replicas=4), 4),
        ({}, Config(), 1),
    ],
)
def test_the_hook_leaves_the_layout_alone_where_it_should(
    changed: dict[str, Any], config: Config, instances: int
) -> None:
    given = megatron_arguments(**changed)
    validate.prepare(given, config)
    assert given.num_distributed_optimizer_instances == instances


def test_the_hook_refuses() -> None:
    with pytest.raises(ConfigError, match="training cannot start"):
        validate.prepare(megatron_arguments(save=None), Config(high_availability=True))


def test_the_flags_are_added_behind_the_scripts_own() -> None:
    def theirs(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--mine", type=int)
        parser.add_argument(MASTER_FLAG, action="store_true")
        return parser

    parser = arguments.with_flags(theirs)(ArgumentParser())
    parsed = parser.parse_args(["--mine", "3", MASTER_FLAG, *FEATURE_FLAGS])
    assert parsed.mine == 3
    assert parsed.enable_high_availability
    assert parsed.distributed_optimizer_no_replica


def test_the_switch_of_the_environment_reaches_the_arguments() -> None:
    parsed = arguments.with_flags(None)(ArgumentParser()).parse_args([])
    arguments.set_switches(parsed, Config(high_availability=True, worker_reboot=True))
    assert (parsed.enable_high_availability, parsed.enable_worker_reboot) == (True, True)
    assert parsed.enable_hbmfault_repair is False
