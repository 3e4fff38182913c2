"""Where copies of optimizer shards lie, and what each kind of fault then leads to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindio_tft_patch.adaptors.doctor.layout import Layout, layout_of
from mindio_tft_patch.adaptors.doctor.outcomes import ANEW, NOTHING, OLDER, RELOADED, REPAIRED, SAVED, Job, foresee
from mindio_tft_patch.adaptors.doctor.sizes import checkpoint_bytes, in_words, parameters
from mindio_tft_patch.controller import decide
from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.roster import LOSING, Fault, Roster
from mindio_tft_patch.protocol.messages import CommitState, Ready, Register, Role
from mindio_tft_patch.protocol.phases import FaultKind, Strategy

SHARDED = {"use_distributed_optimizer": True}
BOTH = {"repairs": True, "reboots": True}
# Fault in the table -> kind, and ranks that have it.
FAULTS = {
    "death of one process": (FaultKind.PROCESS_DEATH, (2,)),
    "death of rank 0": (FaultKind.PROCESS_DEATH, (0,)),
    "both holders": (FaultKind.PROCESS_DEATH, (0, 2)),
    "two processes": (FaultKind.PROCESS_DEATH, (0, 2)),
    "on-chip memory error": (FaultKind.MEMORY, (1,)),
    "network error": (FaultKind.NETWORK, (3,)),
    "a rank that hangs": (FaultKind.HANG, (3,)),
    "exception": (FaultKind.EXCEPTION, (0,)),
    "SIGTERM": (FaultKind.TERMINATED, (0,)),
}
OUTCOMES = {
    Strategy.RETRY: REPAIRED,
    Strategy.RESPAWN: ANEW,
    Strategy.RELOAD: RELOADED,
    Strategy.DUMP: SAVED,
    Strategy.EXIT: OLDER,
}


def layout(world: int, per_node: int, copies: int = 2, **arguments: Any) -> Layout:
    found = layout_of({**SHARDED, **arguments}, world, per_node, copies)
    assert found is not None
    return found


def ranks(found: Layout, name: str = "dense") -> list[tuple[int, ...]]:
    return sorted(one.ranks for one in found.sets if one.name == name)


def outcome(job: Job, start: str) -> str:
    (one,) = [row for row in foresee(job) if row.fault.startswith(start)]
    return one.outcome


def test_copies_are_half_a_data_parallel_group_apart() -> None:
    assert ranks(layout(4, 4)) == [(0, 2), (1, 3)]
    assert ranks(layout(8, 8, tensor_model_parallel_size=2)) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert ranks(layout(8, 8, pipeline_model_parallel_size=2)) == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_the_other_rank_order_counts() -> None:
    found = layout(8, 4, pipeline_model_parallel_size=2, tensor_model_parallel_size=2, use_tp_pp_dp_mapping=True)
    assert ranks(found) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert not found.alone_on(0)


def test_experts_have_copies_of_their_own() -> None:
    found = layout(8, 8, num_experts=4, expert_model_parallel_size=2)
    assert ranks(found, "expert") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_without_a_distributed_optimizer_the_whole_group_has_everything() -> None:
    assert ranks(layout(3, 3, use_distributed_optimizer=False)) == [(0, 1, 2)]


@pytest.mark.parametrize("arguments", [{"tensor_model_parallel_size": 3}, {"pipeline_model_parallel_size": 4}])
def test_sizes_that_do_not_come_out_even_have_no_layout(arguments: dict[str, Any]) -> None:
    assert layout_of({**SHARDED, **arguments}, 4, 4, 2) is None


def test_a_protected_job_under_ttprun_survives_every_single_process() -> None:
    rows = foresee(Job(layout=layout(4, 4)))
    lost = {row.fault for row in rows if not row.saved}
    assert lost == {
        "loss of the node",
        "both holders of one shard at once",
        "fault before the first step is complete",
        "fault while saving, or disk full",
    }
    assert all(row.why for row in rows)


def test_two_holders_are_named() -> None:
    (row,) = [row for row in foresee(Job(layout=layout(4, 4))) if "holders" in row.fault]
    assert "ranks 0, 2" in row.why


def test_a_node_that_holds_all_copies_costs_steps() -> None:
    assert outcome(Job(layout=layout(8, 4)), "loss of another node") == SAVED
    together = layout(16, 4, pipeline_model_parallel_size=4)
    assert outcome(Job(layout=together), "loss of another node") == OLDER
    assert outcome(Job(layout=layout(8, 4)), "loss of the first node") == OLDER


def test_under_torchrun_rank_0_is_not_survived() -> None:
    job = Job(layout=layout(4, 4), launcher="torchrun")
    assert outcome(job, "death of rank 0") == OLDER
    assert outcome(job, "death of one process") == SAVED


def test_without_replicas_only_what_leaves_all_processes_alive_is_saved() -> None:
    job = Job(layout=layout(4, 4, copies=1))
    assert outcome(job, "death of one process") == OLDER
    assert outcome(job, "a rank that hangs") == OLDER
    assert outcome(job, "exception") == SAVED
    assert outcome(job, "SIGTERM") == SAVED


def decided(job: Job, kind: FaultKind, ranks: tuple[int, ...]) -> str:
    """What the controller would choose."""
    assert job.layout is not None
    now, options = 1000.0, Options(world_size=4)
    roster = Roster(options)
    if job.agent:
        roster.register(Register(Role.AGENT, -1, 4, 9, "a", 0, (0, 1, 2, 3)), now)
    offered = {
        Strategy.RETRY: job.repairs,
        Strategy.RESPAWN: job.reboots and job.placeable,
        Strategy.RELOAD: (job.reboots or job.reloads) and job.placeable,
    }
    strategies = (*(strategy for strategy, on in offered.items() if on), Strategy.DUMP)
    for rank, state in roster.ranks.items():
        roster.register(Register(Role.PROCESSOR, rank, 4, 100 + rank, "a"), now)
        state.ready = Ready(rank, 0, job.layout.sets, strategies)
        state.commit = CommitState(step=3)
    faults = [Fault(rank, kind, "") for rank in ranks]
    for rank, fault in zip(ranks, faults, strict=True):
        if fault.losing:
            roster.ranks[rank].lost = fault
        elif kind is FaultKind.MEMORY:
            roster.ranks[rank].suspect = "its memory had a fault"
    plan = decide.choose_strategy(roster, faults, now, excluded={})[0]
    nobody = plan.strategy is Strategy.RESPAWN and not plan.lost and not plan.faulty
    return OUTCOMES[Strategy.RETRY if nobody else plan.strategy]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("launcher", ["ttprun", "torchrun"])
@pytest.mark.parametrize("placeable", [True, False])
@pytest.mark.parametrize("flags", [{}, {"repairs": True}, {"reboots": True}, BOTH, {"reloads": True}])
def test_the_table_says_what_the_controller_will_decide(
    flags: dict[str, bool], placeable: bool, launcher: str, copies: int
) -> None:
    job = Job(layout=layout(4, 4, copies=copies), launcher=launcher, placeable=placeable, **flags)  # type: ignore[arg-type]
    for row in foresee(job):
        for start, (kind, ranks) in FAULTS.items():
            # Under torchrun rank 0 has the controller, which then decides nothing.
            if row.fault.startswith(start) and not (launcher == "torchrun" and kind in LOSING and 0 in ranks):
                assert row.outcome == decided(job, kind, ranks), row


def test_with_both_flags_nothing_that_leaves_a_copy_ends_the_job() -> None:
    rows = foresee(Job(layout=layout(8, 4), **BOTH))  # type: ignore[arg-type]
    ends = {row.fault for row in rows if row.outcome in (SAVED, OLDER, NOTHING)}
    assert {fault.partition(" to ")[0].partition(" in place")[0] for fault in ends} == {
        "loss of the first node",
        "exception in training",
        "SIGTERM",
        "recovery number 101",
        "fault during the set-up",
        "disk full",
    }


def test_a_node_may_be_started_again_for_some_time() -> None:
    job = Job(layout=layout(8, 4), reboots=True, return_seconds=77)
    (row,) = [row for row in foresee(job) if row.fault == "loss of another node"]
    assert row.outcome == ANEW and "within 77 s (TFT_RETURN_SECONDS)" in row.why
    assert outcome(replace(job, static=False), "loss of another node") == SAVED
    assert outcome(replace(job, launcher="torchrun"), "loss of another node") == SAVED


def test_a_budget_of_nothing_switches_recovery_in_place_off() -> None:
    rows = foresee(Job(layout=layout(4, 4), budget=0, **BOTH))  # type: ignore[arg-type]
    assert not {REPAIRED, ANEW, RELOADED} & {row.outcome for row in rows}
    assert any("TFT_RESTART_BUDGET=0" in row.why for row in rows)


def test_without_a_flag_the_table_names_the_one_that_helps() -> None:
    rows = foresee(Job(layout=layout(4, 4)))
    assert any("with --enable-worker-reboot the job would stay up" in row.why for row in rows)
    assert any("with --enable-hbmfault-repair the job would stay up" in row.why for row in rows)


@pytest.mark.parametrize("flags", [{}, {"repairs": True}, {"reboots": True}, BOTH, {"reloads": True}])
@pytest.mark.parametrize("launcher", ["ttprun", "torchrun"])
def test_with_an_external_loader_neither_respawn_nor_reload_is_hinted_at(flags: dict[str, bool], launcher: str) -> None:
    rows = foresee(Job(layout=layout(8, 4), placeable=False, launcher=launcher, **flags))  # type: ignore[arg-type]
    assert not {ANEW, RELOADED} & {row.outcome for row in rows}
    said = " ".join(row.why for row in rows)
    assert "--enable-worker-reboot" not in said and "with --dataloader-type external no process is started anew" in said
    assert any(row.fault.startswith("recovery number") for row in rows) is bool(flags.get("repairs"))


def test_a_flag_that_is_on_is_not_recommended() -> None:
    rows = foresee(Job(layout=layout(4, 4, copies=1), repairs=True, periodic=False))
    assert not any("with --enable-hbmfault-repair the job would stay up" in row.why for row in rows)


def test_without_periodic_checkpoints_there_is_nothing_older() -> None:
    assert outcome(Job(layout=layout(4, 4), periodic=False), "both holders") == NOTHING


def test_a_job_without_the_switch_is_not_protected() -> None:
    (row,) = foresee(Job(protected=False, layout=layout(4, 4)))
    assert row.outcome == OLDER and "--enable-high-availability" in row.why


def test_arguments_that_cannot_start_have_no_outcome() -> None:
    assert [row.outcome for row in foresee(replace(Job(), layout=None))] == [NOTHING]


def test_the_size_of_a_checkpoint_is_about_right() -> None:
    gpt3 = {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "vocab_size": 51200}
    count = parameters(gpt3)
    assert count is not None and abs(count - 175e9) < 5e9
    assert checkpoint_bytes({**gpt3, "bf16": True}) == 14 * count
    assert checkpoint_bytes(gpt3) == 12 * count
    assert checkpoint_bytes({**gpt3, "bf16": True, "no_save_optim": True}) == 2 * count
    assert parameters({}) is None


def test_grouped_queries_gates_and_experts_are_counted() -> None:
    llama = {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "group_query_attention": True,
        "swiglu": True,
        "vocab_size": 128256,
        "untie_embeddings_and_output_weights": True,
    }
    assert abs((parameters(llama) or 0) - 8.03e9) < 0.1e9
    mixtral = {**llama, "vocab_size": 32000, "num_experts": 8, "moe_ffn_hidden_size": 14336}
    assert abs((parameters(mixtral) or 0) - 46.7e9) < 0.5e9


@pytest.mark.parametrize(("size", "words"), [(10, "10 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_sizes_are_readable(size: int, words: str) -> None:
    assert in_words(size) == words
