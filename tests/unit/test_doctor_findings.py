"""What the doctor says about network, save directory, variables, script and data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from mindio_tft_patch.adaptors.doctor import network, script, settings, software, storage
from mindio_tft_patch.adaptors.doctor.command import Launch
from mindio_tft_patch.adaptors.doctor.findings import Finding, Level
from mindio_tft_patch.adaptors.doctor.network import ELSEWHERE, FREE, TAKEN, Situation
from mindio_tft_patch.adaptors.doctor.reading import Reading
from mindio_tft_patch.adaptors.doctor.storage import Plan, SaveFolder
from mindio_tft_patch.config import Config, read_config
from mindio_tft_patch.protocol.keys import new_keys, write_keys
from mindio_tft_patch.variables import known_variables

PROTECTED = Config(high_availability=True)
ONE_NODE = Launch(ranks_per_node=4, static=False)
TWO_NODES = Launch(nodes=2, nodes_max=2, ranks_per_node=4, master_address="10.0.0.1")
FOLDER = SaveFolder(Path("/data/save"), free_bytes=1000, bytes_per_second=10.0)
PLAN = Plan(load="/data/save", checkpoint_bytes=100)


class FakeNetwork:
    """Names and ports that are given; every other address stands for itself, every other port is free."""

    def __init__(self, names: dict[str, list[str]] | None = None, ports: dict[int, str] | None = None) -> None:
        self.names, self.ports = names or {}, ports or {}

    def resolve(self, host: str) -> list[str]:
        return self.names.get(host, [host])

    def port(self, address: str, port: int) -> str:
        return self.ports.get(port, FREE)


def only(findings: Iterable[Finding], level: Level) -> Finding:
    (one,) = [finding for finding in findings if finding.level is level]
    assert one.change, "a finding that is not ok says what to change"
    return one


def levels(findings: Iterable[Finding]) -> set[Level]:
    return {finding.level for finding in findings}


# ---------------------------------------------------------------------- network


def test_free_ports_and_keys_are_fine() -> None:
    assert levels(network.judge(Situation(PROTECTED, ONE_NODE, "ttprun", False), FakeNetwork())) == {Level.OK}


def test_a_taken_port_names_the_variable() -> None:
    situation = Situation(PROTECTED, ONE_NODE, "ttprun", False)
    assert "TTP_PORT" in only(network.judge(situation, FakeNetwork(ports={8000: TAKEN})), Level.ERROR).change
    static = replace(situation, launch=replace(ONE_NODE, static=True))
    assert "--master-port" in only(network.judge(static, FakeNetwork(ports={29500: TAKEN})), Level.ERROR).change


def test_one_port_cannot_serve_two() -> None:
    launch = replace(ONE_NODE, static=True, master_port=8000)
    found = only(network.judge(Situation(PROTECTED, launch, "ttprun", False), FakeNetwork()), Level.ERROR)
    assert "TTP_PORT" in found.change and "--master-port" in found.change


def test_ports_of_another_machine_are_not_tried() -> None:
    found = list(network.judge(Situation(PROTECTED, TWO_NODES, "ttprun", False), FakeNetwork(ports={8000: ELSEWHERE})))
    assert "node 0" in only(found, Level.WARNING).change


def test_under_torchrun_several_nodes_need_an_address() -> None:
    assert levels(network.judge(Situation(PROTECTED, TWO_NODES, "ttprun", False), FakeNetwork())) == {Level.OK}
    found = only(network.judge(Situation(PROTECTED, TWO_NODES, "torchrun", False), FakeNetwork()), Level.ERROR)
    assert "TTP_ADDR" in found.change


def test_a_name_for_the_hosts_own_loopback_address() -> None:
    names = FakeNetwork(names={"head": ["127.0.1.1"], "nowhere": []})
    config = replace(PROTECTED, controller_bind="head", controller_address="head")
    assert "127.0.1.1" in only(network.judge(Situation(config, ONE_NODE, "ttprun", True), names), Level.WARNING).message
    found = only(network.judge(Situation(config, TWO_NODES, "ttprun", True), names), Level.ERROR)
    assert "/etc/hosts" in found.message and "TTP_ADDR" in found.change
    lost = replace(PROTECTED, controller_bind="nowhere", controller_address="nowhere")
    found = only(network.judge(Situation(lost, ONE_NODE, "ttprun", True), names), Level.ERROR)
    assert "does not resolve" in found.message


def test_an_open_channel_is_warned_of_off_loopback_only() -> None:
    open_channel = replace(PROTECTED, encrypted=False)
    assert levels(network.judge(Situation(open_channel, ONE_NODE, "ttprun", False), FakeNetwork())) == {Level.OK}
    found = only(network.judge(Situation(open_channel, TWO_NODES, "ttprun", False), FakeNetwork()), Level.WARNING)
    assert "TTP_TLS" in found.change


def test_a_limit_of_open_files_is_compared_with_the_ranks() -> None:
    assert levels(network.judge_descriptors(2, 1)) == {Level.OK}
    assert "ulimit -n" in only(network.judge_descriptors(10**8, 10**6), Level.ERROR).change


# ---------------------------------------------------------------------- recovery in place


def test_recovery_in_place_needs_a_torch_that_connects_groups_anew() -> None:
    config = replace(PROTECTED, worker_reboot=True)
    assert levels(software.judge_in_place(Reading(torch="2.14.1+cu130"), config)) == {Level.OK}
    found = only(software.judge_in_place(Reading(torch="2.9.0"), config), Level.ERROR)
    assert "2.9.0 is installed" in found.message and "2.14" in found.change
    assert not list(software.judge_in_place(Reading(torch="2.9.0"), PROTECTED))


def test_on_an_accelerator_the_doctor_says_that_nobody_has_tried_it() -> None:
    reading = Reading(torch="2.14.1", accelerator=True)
    found = only(software.judge_in_place(reading, replace(PROTECTED, hbmfault_repair=True)), Level.WARNING)
    assert "nobody has tried it" in found.message.lower()


# ---------------------------------------------------------------------- save directory


def test_a_folder_with_room_is_fine() -> None:
    assert levels(storage.judge(FOLDER, PLAN)) == {Level.OK}


@pytest.mark.parametrize(
    ("folder", "plan", "level", "word"),
    [
        (replace(FOLDER, trouble="Read-only file system"), PLAN, Level.ERROR, "--save"),
        (FOLDER, replace(PLAN, checkpoint_bytes=1001, dump_seconds=1000), Level.ERROR, "--save"),
        (FOLDER, replace(PLAN, saves=10), Level.WARNING, "--save-interval"),
        (FOLDER, replace(PLAN, dump_seconds=9.0), Level.WARNING, "TTP_OT"),
        (FOLDER, replace(PLAN, load=None), Level.WARNING, "--load"),
        (FOLDER, replace(PLAN, load="/data/other"), Level.WARNING, "--load"),
        (replace(FOLDER, complete=(5, 10)), PLAN, Level.ERROR, "Write 10"),
        (replace(FOLDER, broken=(5,)), PLAN, Level.ERROR, "Move"),
        (replace(FOLDER, tracker="15", complete=(10,), broken=(15,)), PLAN, Level.ERROR, "Write 10"),
        (replace(FOLDER, tracker="7", complete=(5,)), PLAN, Level.ERROR, "Write 5"),
        (replace(FOLDER, tracker="1x", complete=(5,)), PLAN, Level.ERROR, "Write 5"),
        (replace(FOLDER, tracker="5", complete=(5,), broken=(9,)), PLAN, Level.WARNING, "not loaded"),
        (replace(FOLDER, leftovers=(".tft-dump-1-1-ab",)), PLAN, Level.WARNING, ".tft-dump-1-1-ab"),
        (replace(FOLDER, file_system="xfs"), replace(PLAN, nodes=2), Level.WARNING, "share"),
    ],
)
def test_each_trouble_of_the_save_directory(folder: SaveFolder, plan: Plan, level: Level, word: str) -> None:
    assert word in only(storage.judge(folder, plan), level).change


def test_a_missing_tracker_is_shouted_about() -> None:
    assert "ITERATION 0" in only(storage.judge(replace(FOLDER, complete=(5,)), PLAN), Level.ERROR).message


def test_looking_tells_complete_checkpoints_from_broken_ones_and_leaves_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        (tmp_path / f"iter_{step:07d}").mkdir()
    for name in (".metadata", "metadata.json", "__0_0.distcp"):
        (tmp_path / "iter_0000001" / name).write_text("x")
    (tmp_path / "iter_0000002" / "__0_0.distcp").write_text("x")
    for step, content in ((3, "x"), (4, "")):
        part = tmp_path / f"iter_{step:07d}" / "mp_rank_00"
        part.mkdir()
        (part / "model_optim_rng.pt").write_text(content)
    (tmp_path / storage.TRACKER).write_text("3\n")
    (tmp_path / ".tft-dump-4-1-ab").mkdir()
    before = sorted(tmp_path.iterdir())
    found = storage.look_at(tmp_path)
    assert (found.complete, found.broken, found.tracker) == ((1, 3), (2, 4), "3")
    assert found.leftovers == (".tft-dump-4-1-ab",) and not found.trouble and found.free_bytes > 0
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "save").write_text("")
    assert "not a folder" in storage.look_at(tmp_path / "save").trouble
    assert not storage.look_at(tmp_path / "a" / "b").exists
    assert not (tmp_path / "a").exists()


# ---------------------------------------------------------------------- variables, script, data


def test_every_variable_of_the_configuration_is_known() -> None:
    known = known_variables()
    assert {"TTP_PORT", "TTP_TLS", "TTP_ADDR", "HIGH_AVAILABILITY", "TFT_CONTROLLER", "TTP_LOG_PATH"} <= known


@pytest.mark.parametrize(
    ("name", "hint"), [("TTP_PROT", "TTP_PORT"), ("TFT_HANG_SECOND", "TFT_HANG"), ("HIGH_AVAILIBILITY", "HIGH_AVAIL")]
)
def test_a_misspelt_variable_is_pointed_out(name: str, hint: str) -> None:
    assert hint in only(settings.judge(Config(), {name: "1"}), Level.WARNING).change


def test_a_value_out_of_range_names_its_variable() -> None:
    environ = {"TTP_OT": "-1"}
    assert "TTP_OT" in only(settings.judge(read_config([], environ), environ), Level.WARNING).change
    assert levels(settings.judge(Config(), {"PATH": "/bin", "HOME": "/"})) == {Level.OK}


# Taken as they are: any text makes sense, or the network checks look at them.
_ANY_TEXT = {"MINDX_TASK_ID", "TTP_LOG_PATH", "TFT_INJECT_STATE"}
_OF_THE_TESTS = {"TFT_MATRIX", "TFT_MATRIX_SEED", "TFT_MATRIX_SIZE", "TFT_IN_PLACE_SIZE", "TFT_BENCH_PEERS"}


@pytest.mark.parametrize("name", sorted(known_variables() - _ANY_TEXT - _OF_THE_TESTS))
def test_every_variable_that_is_malformed_is_found(name: str) -> None:
    environ = {name: "no / such value"}
    config = replace(read_config([], environ), high_availability=True)
    found = [one for one in settings.judge(config, environ) if one.level is not Level.OK]
    assert found and all(name in f"{one.message} {one.change}" and one.change for one in found), found


def test_a_log_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        environ = {"TTP_LOG_PATH": str(bad)}
        config = replace(read_config([], environ), high_availability=True)
        assert "TTP_LOG_PATH" in only(settings.judge(config, environ), Level.WARNING).change
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


FAULT = "rank=1,step=5,moment=forward,kind=sigkill"
FOUR_RANKS = Config(high_availability=True, world_size=4)


def test_faults_on_purpose_are_warned_of() -> None:
    found = only(settings.judge(FOUR_RANKS, {"TFT_INJECT": FAULT}), Level.WARNING)
    assert "1 fault(s) will be injected on purpose" in found.message and "Unset TFT_INJECT" in found.change
    unread = only(settings.judge(replace(FOUR_RANKS, high_availability=False), {"TFT_INJECT": "x"}), Level.WARNING)
    assert "--enable-high-availability" in unread.message
    assert levels(settings.judge(FOUR_RANKS, {"TFT_INJECT": ""})) == {Level.OK}


@pytest.mark.parametrize(
    "text", ["nonsense", "rank=1,step=5,moment=forward,kind=sigkil", "rank=1,step=x,moment=forward,kind=sigkill"]
)
def test_a_malformed_schedule_of_faults_is_an_error(text: str) -> None:
    found = only(settings.judge(FOUR_RANKS, {"TFT_INJECT": text}), Level.ERROR)
    assert "would refuse to start" in found.message and "Or unset TFT_INJECT" in found.change


def test_a_fault_on_a_rank_that_the_job_does_not_have_is_told() -> None:
    environ = {"TFT_INJECT": FAULT.replace("rank=1", "rank=4")}
    told = [one.message for one in settings.judge(FOUR_RANKS, environ)]
    assert any("names rank 4, but the job has 4 rank(s)" in message for message in told)
    unknown = settings.judge(replace(FOUR_RANKS, world_size=0), environ)
    assert not any("but the job has" in one.message for one in unknown), "the number of ranks is not known"


def test_what_remembers_the_faults_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ = {"TFT_INJECT": FAULT, "TFT_INJECT_STATE": str(tmp_path / "file")}
    assert "TFT_INJECT_STATE" in only(settings.judge(FOUR_RANKS, environ), Level.ERROR).change


def test_a_key_file_is_read_where_the_controller_is_the_cluster_managers(tmp_path: Path) -> None:
    environ = {"TFT_KEYS": str(tmp_path / "keys"), "MINDX_TASK_ID": "7"}
    config = read_config(["--enable-high-availability"], environ)
    assert "cannot be read" in only(settings.judge(config, environ), Level.ERROR).message
    write_keys(tmp_path / "keys", new_keys())
    assert levels(settings.judge(config, environ)) == {Level.OK}


def test_the_effect_of_high_availability_is_said() -> None:
    environ = {"HIGH_AVAILABILITY": "dump"}
    found = only(settings.judge(read_config([], environ), environ), Level.WARNING)
    assert "switches on --enable-high-availability" in found.message


def test_a_script_must_exist_and_import_the_plugin(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    launch = Launch(script=str(path))
    assert "path" in only(script.judge_script(launch, protected=True, environ={}), Level.ERROR).change
    path.write_text("import torch\n")
    assert (
        "import mindio_tft_patch" in only(script.judge_script(launch, protected=True, environ={}), Level.ERROR).change
    )
    assert not list(script.judge_script(launch, protected=False, environ={}))
    path.write_text("import os\nimport mindio_tft_patch  # first\n")
    assert not list(script.judge_script(launch, protected=True, environ={}))
    assert only(script.judge_script(Launch(), protected=True, environ={}), Level.ERROR)


MAIN = "def main():\n    pretrain(1)\n\nif __name__ == '__main__':\n    main()\n"


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        (f"from megatron.training import pretrain\n{MAIN}import mindio_tft_patch\n", Level.ERROR, ["line 7", "line 6"]),
        (f"{MAIN}    import mindio_tft_patch\n", Level.ERROR, ["line 6", "line 5", "too late"]),
        ("import t\nt.pretrain()\nfrom mindio_tft_patch import x\n", Level.ERROR, ["line 3", "line 2"]),
        (
            f"import torch\nimport megatron.core as core\nimport mindio_tft_patch\n{MAIN}",
            Level.WARNING,
            ["megatron on line 2", "line 3", "a partial"],
        ),
        (
            f"try:\n    from mindspeed_llm import megatron_adaptor\nexcept ImportError:\n    pass\n"
            f"import mindio_tft_patch\n{MAIN}",
            Level.ERROR,
            ["mindspeed_llm on line 2", "line 5", "refuses"],
        ),
        (
            f"def start():\n    import mindio_tft_patch\nstart()\n{MAIN}",
            Level.WARNING,
            ["inside of a function (line 2)"],
        ),
        (f'"""\nimport mindio_tft_patch\n"""\n{MAIN}', Level.ERROR, ["does not import"]),
        (
            f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mindio_tft_patch\n{MAIN}",
            Level.ERROR,
            ["does not import"],
        ),
        ("import mindio_tft_patch\ndef (\n", Level.ERROR, ["no Python script", "line 2"]),
    ],
)
def test_an_import_that_comes_too_late_is_told_with_its_line(
    tmp_path: Path, text: str, level: Level, words: list[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    found = only(script.judge_script(Launch(script=str(path)), protected=True, environ={}), level)
    assert all(word in found.message for word in words), found
    assert "train.py" in found.change or "Correct it" in found.change


@pytest.mark.parametrize(
    "text",
    [
        f"import os\nimport mindio_tft_patch  # first\nimport megatron\n{MAIN}",
        f"import importlib\nimportlib.import_module('mindio_tft_patch')\nimport megatron\n{MAIN}",
        f"if True:\n    import mindio_tft_patch\nimport megatron\n{MAIN}",
        f"def late():\n    import megatron\n    pretrain()\nimport mindio_tft_patch\n{MAIN}",
        "if __name__ == '__main__':\n    import mindio_tft_patch\n    import megatron\n    pretrain()\n",
    ],
)
def test_an_import_in_time_is_nothing_to_speak_of(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    assert not list(script.judge_script(Launch(script=str(path)), protected=True, environ={}))


def test_our_own_script_imports_the_plugin_in_time() -> None:
    own = Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"
    assert not list(script.judge_script(Launch(script=str(own)), protected=True, environ={}))


def _beside(folder: Path, text: str, **files: str) -> Finding:
    """What is found of a script with these files beside it (a__b is b in the folder a)."""
    for name, content in files.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    path = folder / "train.py"
    path.write_text(f"{text}\n{MAIN}")
    (found,) = script.judge_script(Launch(script=str(path)), protected=True, environ={})
    return found


def test_a_script_that_nothing_protects_is_an_error(tmp_path: Path) -> None:
    found = _beside(
        tmp_path,
        "import os\nfrom setup_of_us import a\nimport package.part",
        setup_of_us="import further, no_such_module\n",
        further="import setup_of_us\n",
        package__part="from . import other\n",
        package__other="x = 1\n",
    )
    assert found.level is Level.ERROR and "nothing is protected" in found.message
    assert "refuses the flags" not in found.message, "HIGH_AVAILABILITY is no flag that Megatron could refuse"
    launch = Launch(script=str(tmp_path / "train.py"), script_args=("--enable-high-availability",))
    (found,) = script.judge_script(launch, protected=True, environ={})
    assert found.level is Level.ERROR and "Megatron refuses the flags" in found.message


@pytest.mark.parametrize(
    ("text", "files", "words"),
    [
        (
            "import setup_of_us",
            {"setup_of_us": "import mindio_tft_patch\n"},
            "setup_of_us.py, of setup_of_us, names it",
        ),
        ("import one", {"one": "def f():\n    import two\n", "two": "import mindio_tft_patch\n"}, "two.py, of two"),
        ("import megatron.x", {"megatron__x": "", "megatron__y": "import mindio_tft_patch"}, "y.py, of megatron"),
        ("import package_a.b", {"package_a__c": "import mindio_tft_patch\n", "package_a__b": ""}, "c.py, of package_a"),
        ("import no_such_module", {}, "no_such_module, which it imports, was not found here"),
        ("import importlib\nimportlib.import_module(input())", {}, "cannot be followed"),
        ("exec(open('setup').read())", {}, "cannot be followed"),
        ("import mindio_ttp.framework_ttp as ttp", {}, "names the SDK"),
        ("import one", {"one": "from mindio_ttp import framework_ttp\n"}, "names the SDK"),
    ],
)
def test_where_another_file_may_import_the_plugin_it_is_a_warning(
    tmp_path: Path, text: str, files: dict[str, str], words: str
) -> None:
    found = _beside(tmp_path, text, **files)
    assert found.level is Level.WARNING and words in found.message, found


def test_modules_are_looked_for_on_the_path_of_the_job_too(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "ours_alone.py").write_text("import mindio_tft_patch\n")
    (tmp_path / "train.py").write_text(f"import ours_alone\n{MAIN}")
    launch = Launch(script=str(tmp_path / "train.py"))
    environ = {"PYTHONPATH": str(tmp_path / "library")}
    found = only(script.judge_script(launch, protected=True, environ=environ), Level.WARNING)
    assert "ours_alone.py, of ours_alone, names it" in found.message


@pytest.mark.parametrize("words", [["--standby"], ["--lr", "1", "--standby=2"], ["--standby", "2"]])
def test_an_option_of_ttprun_behind_the_script_is_an_error(words: list[str]) -> None:
    launch = Launch(script="train.py", script_args=tuple(words))
    protected = Config(high_availability=True)
    found = only(script.judge_standby(launch, protected), Level.ERROR)
    assert "is an option of ttprun" in found.message and "Put it before the script's name" in found.change
    assert not list(script.judge_words(["--standby"], ["--save"], protected)), "told once"
    for other in (replace(protected, adaptor="own"), Config()):
        assert not list(script.judge_standby(launch, other)), "the script may have such an option"


def test_an_unknown_argument_gets_a_suggestion() -> None:
    found = only(script.judge_words(["--save-intervall", "5"], ["--save", "--save-interval"]), Level.WARNING)
    assert "Did you mean --save-interval?" in found.change


def test_missing_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    arguments = {"data_path": ["0.3", str(tmp_path / "a")]}
    assert "a.idx" in only(script.judge_data(arguments), Level.ERROR).message
    (tmp_path / "a.idx").touch()
    assert levels(script.judge_data(arguments)) == {Level.OK}
    assert not list(script.judge_data({"data_path": None}))
