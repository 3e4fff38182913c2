"""What the doctor makes of a command line, without torch and Megatron."""

from __future__ import annotations

import pytest

from mindio_tft_patch.adaptors.doctor.command import read_command, read_leniently, without_launcher
from mindio_tft_patch.adaptors.doctor.megatron_words import completed, read_words


@pytest.mark.parametrize(
    ("line", "launcher", "words"),
    [
        ("ttprun --nnodes 1 a.py", "ttprun", "--nnodes 1 a.py"),
        ("/opt/bin/torchrun a.py", "torchrun", "a.py"),
        ("python -m torch.distributed.run a.py", "torchrun", "a.py"),
        ("python3.12 -u -m mindio_tft_patch.launch.ttprun a.py", "ttprun", "a.py"),
        ("python -X dev /opt/bin/torchrun a.py", "torchrun", "a.py"),
        ("python a.py --save x", "python", "a.py --save x"),
        ("srun -n 2 ttprun a.py", "ttprun", "a.py"),
        ("bash train.sh", "", "bash train.sh"),
    ],
)
def test_the_launcher_is_found_wherever_it_stands(line: str, launcher: str, words: str) -> None:
    command = read_command(line.split())
    assert (command.launcher, " ".join(command.words)) == (launcher, words)


def test_variables_in_front_of_the_command_count() -> None:
    command = read_command(["env", "TTP_PORT=9000", "TTP_TLS=0", "srun", "ttprun", "a.py"])
    assert command.assignments == {"TTP_PORT": "9000", "TTP_TLS": "0"}
    assert command.before == ("srun",)


def test_torchruns_options_are_read_without_torchrun() -> None:
    line = "--nnodes=2:4 --nproc_per_node 8 --node-rank 1 --master-addr n0 --master-port 1234 -m train --save x"
    launch = read_leniently(line.split())
    assert (launch.nodes, launch.nodes_max, launch.ranks_per_node, launch.node_rank) == (2, 4, 8, 1)
    assert (launch.master_address, launch.master_port, launch.static, launch.module) == ("n0", 1234, True, True)
    assert (launch.script, launch.script_args, launch.world_size) == ("train", ("--save", "x"), 16)


@pytest.mark.parametrize("standby", ["--standby", "--standby 2", "--standby=2"])
def test_the_number_of_stand_bys_may_be_left_out(standby: str) -> None:
    launch = read_leniently(f"--nnodes 2 {standby} --nproc-per-node 4 a.py --save x".split())
    assert (launch.world_size, launch.script) == (8, "a.py")


@pytest.mark.parametrize("options", ["--standalone --nproc-per-node 4", "--nproc-per-node 4"])
def test_a_job_of_one_node_without_a_port_takes_a_free_one(options: str) -> None:
    launch = read_leniently(f"{options} a.py".split())
    assert not launch.static and launch.master_port == 0


def test_an_endpoint_wins_over_the_master_address() -> None:
    launch = read_leniently(
        ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "[fe80::1]:77", "--master-port", "5", "a.py"]
    )
    assert (launch.master_address, launch.master_port, launch.static) == ("fe80::1", 77, False)


def test_without_a_launcher_the_environment_tells_the_size() -> None:
    command = read_command(["python", "a.py", "--x", "1"])
    launch = without_launcher(command, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "9", "MASTER_ADDR": "n0"})
    assert (launch.nodes, launch.ranks_per_node, launch.node_rank, launch.master_address) == (2, 8, 1, "n0")
    assert launch.script_args == ("--x", "1")


def test_a_few_flags_of_megatron_are_read_without_megatron() -> None:
    line = "--tensor-model-parallel-size 2 --save=x --data-path 0.5 a 0.5 b --bf16 --train-iters many"
    found = read_words(line.split())
    assert found["tensor_model_parallel_size"] == 2
    assert (found["save"], found["data_path"], found["bf16"]) == ("x", ["0.5", "a", "0.5", "b"], True)
    assert found["train_iters"] is None and found["use_distributed_optimizer"] is False


def test_what_megatron_did_not_work_out_is_worked_out() -> None:
    assert completed({"context_parallel_size": 2}, ["--tensor-model-parallel-size", "2"], 16)["data_parallel_size"] == 4
    assert completed({"data_parallel_size": 3}, (), 16)["data_parallel_size"] == 3
