"""The manifests in launch/kubernetes are valid, and fit the code: ports, variables, flags, times."""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import manifests
from support.manifests import Document

from mindio_tft_patch.config import FEATURE_FLAGS, HBM_FLAG, MASTER_FLAG, REBOOT_FLAG, read_config
from mindio_tft_patch.launch.vigil import EXIT_GRACE_SECONDS, KILL_GRACE_SECONDS, TERM_GRACE_SECONDS
from mindio_tft_patch.variables import unknown_variables

POD_IP = "10.1.2.3"
RENDEZVOUS = {"PyTorchJob": "pytorchjob-port", "Job": "rendezvous", "AscendJob": "ascendjob-port"}
# The label with the job's name that an operator gives to its pods.
JOB_LABEL = {"PyTorchJob": "training.kubeflow.org/job-name", "Job": "volcano.sh/job-name", "AscendJob": "job-name"}
NOT_READ_BY_US = {
    *("CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("NNODES", "NPROC_PER_NODE", "POD_IP", "PYTORCH_NPU_ALLOC_CONF", "SCRIPT", "SET_ENV", "XDL_IP"),
}
DOCUMENT = (manifests.ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
SHARED = manifests.read(manifests.MANIFESTS / "shared.yaml")
PAGES = {folder: manifests.render(manifests.MANIFESTS / folder) for folder in manifests.folders()}

every_folder = pytest.mark.parametrize("folder", [*PAGES])


REPLICAS = [(folder, role) for folder in PAGES for role in manifests.roles(manifests.job_of(PAGES[folder]))]
every_replica = pytest.mark.parametrize(("folder", "role"), REPLICAS)


def _replica(folder: str, role: str) -> Document:
    return manifests.roles(manifests.job_of(PAGES[folder]))[role]


def _variables(folder: str, role: str) -> dict[str, str]:
    fields = {"status.podIP": POD_IP, "status.hostIP": "192.0.2.1"}
    return manifests.variables(_replica(folder, role), fields)


def _ports(replica: Document) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in manifests.container(replica)["ports"]}


def _arguments() -> list[str]:
    return shlex.split((manifests.MANIFESTS / "common" / "arguments").read_text(encoding="utf-8"), comments=True)


def _only(documents: list[Document], kind: str, name: str = "") -> Document:
    (found,) = (one for one in documents if one["kind"] == kind and name in ("", one["metadata"]["name"]))
    return found


# ---------------------------------------------------------------- schemas


def test_there_is_a_folder_for_each_kind_of_job() -> None:
    kinds = {manifests.job_of(documents)["kind"] for documents in PAGES.values()}
    assert kinds == {"PyTorchJob", "Job", "AscendJob"}


@every_folder
def test_every_document_is_valid(folder: str) -> None:
    assert [problem for document in PAGES[folder] for problem in manifests.problems(document)] == []


def test_the_storage_is_valid_and_no_part_of_a_job() -> None:
    assert [problem for document in SHARED for problem in manifests.problems(document)] == []
    kinds = {document["kind"] for documents in PAGES.values() for document in documents}
    assert "PersistentVolumeClaim" not in kinds, "it would be deleted with the job, and the checkpoints with it"


def _misspell(document: Document, *path: str | int) -> Document:
    changed: Any = copy.deepcopy(document)
    place = changed
    for part in path[:-1]:
        place = place[part]
    place[f"{path[-1]}s"] = place.pop(path[-1])
    return dict(changed)


@pytest.mark.parametrize(
    ("folder", "kind", "path"),
    [
        ("pytorchjob", "PyTorchJob", ("spec", "nprocPerNode")),
        ("pytorchjob", "PyTorchJob", ("spec", "runPolicy", "backoffLimit")),
        ("pytorchjob", "PyTorchJob", ("spec", "pytorchReplicaSpecs", "Worker", "restartPolicy")),
        (
            "pytorchjob",
            "PyTorchJob",
            ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers", 0, "ports", 0, "containerPort"),
        ),
        ("pytorchjob", "NetworkPolicy", ("spec", "ingress", 0, "ports", 2, "endPort")),
        ("pytorchjob", "PersistentVolumeClaim", ("spec", "resources", "requests")),
        ("pytorchjob", "ConfigMap", ("data",)),
        ("volcano", "Job", ("spec", "minAvailable")),
        (
            "volcano",
            "Job",
            ("spec", "tasks", 0, "template", "spec", "volumes", 1, "persistentVolumeClaim", "claimName"),
        ),
        ("volcano", "Job", ("spec", "policies", 0, "event")),
        ("mindcluster", "AscendJob", ("spec", "successPolicy")),
        ("mindcluster", "AscendJob", ("spec", "replicaSpecs", "Master", "template", "spec", "enableServiceLinks")),
    ],
)
def test_a_misspelt_field_is_refused(folder: str, kind: str, path: tuple[str | int, ...]) -> None:
    document = next(document for document in [*PAGES[folder], *SHARED] if document["kind"] == kind)
    assert manifests.problems(document) == []
    assert manifests.problems(_misspell(document, *path)) != []


def test_a_value_that_the_operator_would_refuse_is_refused() -> None:
    job = copy.deepcopy(_only(PAGES["volcano"], "Job"))
    job["spec"]["policies"][0]["action"] = "StartAgain"
    assert manifests.problems(job) != []


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="there is no `kubectl`, whose rendering ours is compared to"
)
@every_folder
def test_kubectl_renders_the_same(folder: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(manifests.MANIFESTS / folder)], capture_output=True, text=True, check=True
    )
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}
    assert by_name == {(one["kind"], one["metadata"]["name"]): one for one in PAGES[folder]}


# ---------------------------------------------------------------- the pods


@every_replica
def test_ports_are_those_of_the_variables(folder: str, role: str) -> None:
    replica, environ = _replica(folder, role), _variables(folder, role)
    ports = _ports(replica)
    assert str(ports["ttp-port"]) == environ["TTP_PORT"] == str(read_config([], {}).port)
    kind = manifests.job_of(PAGES[folder])["kind"]
    assert environ.get("MASTER_PORT", str(ports[RENDEZVOUS[kind]])) == str(ports[RENDEZVOUS[kind]])


@every_replica
def test_variables_are_read_by_the_product_and_in_range(folder: str, role: str) -> None:
    environ = _variables(folder, role)
    assert unknown_variables(environ) == {}
    unread = set(environ) - NOT_READ_BY_US
    asked = {name for name in unread if name.startswith(("TTP_", "TFT_", "MASTER_")) or name.endswith("_ADDR")}
    assert unread == asked
    config = read_config(_arguments(), {**environ, "PROCESSOR_ADDR": "pretrain-gpt-master-0"})
    assert config.warnings == ()
    assert (config.controller_bind, config.controller_address) == (POD_IP, "pretrain-gpt-master-0")


def test_the_arguments_switch_recovery_in_place_on() -> None:
    arguments = _arguments()
    assert {MASTER_FLAG, HBM_FLAG, REBOOT_FLAG} <= set(arguments)
    assert {word for word in arguments if word.startswith("--enable-")} <= {MASTER_FLAG, *FEATURE_FLAGS}
    assert arguments[arguments.index("--save") + 1] == arguments[arguments.index("--load") + 1]


@every_replica
def test_a_pod_has_time_for_a_checkpoint_when_it_is_deleted(folder: str, role: str) -> None:
    grace_seconds = _replica(folder, role)["template"]["spec"].get("terminationGracePeriodSeconds")
    if manifests.job_of(PAGES[folder])["kind"] == "AscendJob":
        assert grace_seconds is None, "TaskD's agent saves nothing on SIGTERM: a longer time would promise that it does"
        return
    after = EXIT_GRACE_SECONDS + TERM_GRACE_SECONDS + KILL_GRACE_SECONDS
    assert grace_seconds > float(_variables(folder, role)["TTP_OT"]) + after


@every_replica
def test_the_others_wait_longer_than_kubernetes_needs_to_give_up_a_pod(folder: str, role: str) -> None:
    spec = _replica(folder, role)["template"]["spec"]
    longest = max((rule["tolerationSeconds"] for rule in spec.get("tolerations", [])), default=300)
    assert float(_variables(folder, role)["TFT_RETURN_SECONDS"]) >= longest + 300


@every_folder
def test_numbers_of_nodes_and_processes_agree(folder: str) -> None:
    job = manifests.job_of(PAGES[folder])
    roles = manifests.roles(job)
    for role, replica in roles.items():
        environ = _variables(folder, role)
        assert environ["NNODES"] == str(sum(one["replicas"] for one in roles.values()))
        resources = manifests.container(replica)["resources"]
        devices = {name: count for name, count in resources["limits"].items() if "/" in name}
        assert [str(count) for count in devices.values()] == [environ["NPROC_PER_NODE"]]
        assert devices.items() <= resources["requests"].items()
    assert job["spec"].get("nprocPerNode", environ["NPROC_PER_NODE"]) == environ["NPROC_PER_NODE"]
    gang = job["spec"] if job["kind"] == "Job" else job["spec"]["runPolicy"]["schedulingPolicy"]
    assert str(gang["minAvailable"]) == environ["NNODES"]


@every_folder
def test_all_pods_of_a_job_are_alike(folder: str) -> None:
    first, *others = manifests.roles(manifests.job_of(PAGES[folder])).values()
    assert all(other["template"] == first["template"] for other in others)


@every_folder
def test_a_pod_is_started_again_by_the_kubelet_unless_mindcluster_does_it(folder: str) -> None:
    job = manifests.job_of(PAGES[folder])
    for replica in manifests.roles(job).values():
        policy = replica.get("restartPolicy", replica["template"]["spec"].get("restartPolicy"))
        assert policy == ("Never" if job["kind"] == "AscendJob" else "OnFailure")


@every_replica
def test_nothing_from_outside_can_set_our_variables(folder: str, role: str) -> None:
    # A Service named "ttp" would set TTP_PORT in every pod of its namespace.
    assert _replica(folder, role)["template"]["spec"]["enableServiceLinks"] is False


@every_replica
def test_volumes_lead_to_what_exists_and_paths_to_what_is_mounted(folder: str, role: str) -> None:
    replica, documents = _replica(folder, role), PAGES[folder]
    volumes = {volume["name"]: volume for volume in replica["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in manifests.container(replica)["volumeMounts"]}
    assert len(mounts) == len(volumes)
    for volume in volumes.values():
        if "configMap" in volume:
            assert _only(documents, "ConfigMap", volume["configMap"]["name"])
        if "persistentVolumeClaim" in volume:
            claim = _only(SHARED, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
            assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    environ, arguments = _variables(folder, role), _arguments()
    assert "emptyDir" in mounts[environ["TTP_LOG_PATH"]]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounts["/" + Path(arguments[arguments.index("--save") + 1]).parts[1]]
    command = Path(manifests.container(replica)["command"][1])
    assert command.name in _only(documents, "ConfigMap", mounts[str(command.parent)]["configMap"]["name"])["data"]


@every_folder
def test_the_network_policy_opens_the_ports_of_the_pods_to_pods_of_the_job(folder: str) -> None:
    job, policy = manifests.job_of(PAGES[folder]), _only(PAGES[folder], "NetworkPolicy")
    pods = {"podSelector": {"matchLabels": {JOB_LABEL[job["kind"]]: job["metadata"]["name"]}}}
    assert {"podSelector": policy["spec"]["podSelector"]} == pods
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == [pods]
    opened = {(port["port"], port.get("endPort")) for port in rule["ports"]}
    for replica in manifests.roles(job).values():
        (sysctl,) = replica["template"]["spec"]["securityContext"]["sysctls"]
        assert sysctl["name"] == "net.ipv4.ip_local_port_range"
        low, high = map(int, sysctl["value"].split())
        assert opened == {(low, high), *((port, None) for port in _ports(replica).values())}


@every_folder
def test_pods_of_a_job_lie_on_different_nodes(folder: str) -> None:
    job = manifests.job_of(PAGES[folder])
    for replica in manifests.roles(job).values():
        (term,) = replica["template"]["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["labelSelector"] == {"matchLabels": {JOB_LABEL[job["kind"]]: job["metadata"]["name"]}}
        assert term["topologyKey"] == "kubernetes.io/hostname"


def test_volcano_names_the_first_pod_and_leaves_the_network_policy_to_us() -> None:
    job = _only(PAGES["volcano"], "Job")
    (task,) = job["spec"]["tasks"]
    name = job["metadata"]["name"]
    assert _variables("volcano", task["name"])["MASTER_ADDR"] == f"{name}-{task['name']}-0.{name}"
    assert job["spec"]["plugins"] == {"env": [], "svc": ["--disable-network-policy=true"]}


# ---------------------------------------------------------------- the command


def _run_command(tmp_path: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command of pods with a `ttprun` that only says how it was called."""
    program = tmp_path / "ttprun"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$PROCESSOR_ADDR" "$PPID" "$@"\n')
    program.chmod(0o755)
    return _run_script("common", tmp_path, environ)


def _run_script(folder: str, tmp_path: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(manifests.MANIFESTS / folder / "start.sh")],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


MASTER = {"MASTER_ADDR": "pretrain-gpt-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("folder", "role", "operator"),
    [
        ("pytorchjob", "Worker", {**MASTER, "RANK": "1", "WORLD_SIZE": "16"}),
        ("volcano", "node", {"VC_TASK_INDEX": "1"}),
    ],
)
def test_the_command_is_the_launcher_of_this_node(
    tmp_path: Path, folder: str, role: str, operator: dict[str, str]
) -> None:
    environ = {**_variables(folder, role), **operator}
    done = _run_command(tmp_path, environ)
    assert done.returncode == 0, done.stderr
    processor_address, parent, *words = done.stdout.splitlines()
    assert processor_address == environ["MASTER_ADDR"]
    assert parent == str(os.getpid()), "the shell is still there, and would keep signals from the launcher"
    options = dict(zip(words[0:10:2], words[1:10:2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--node-rank": "1",
        "--nproc-per-node": "8",
        "--master-addr": environ["MASTER_ADDR"],
        "--master-port": environ["MASTER_PORT"],
    }
    assert words[10:] == ["--standby", environ["SCRIPT"], *_arguments()]


def test_the_command_does_not_start_a_node_without_number(tmp_path: Path) -> None:
    done = _run_command(tmp_path, {**_variables("pytorchjob", "Worker"), **MASTER})
    assert done.returncode != 0
    assert "neither RANK nor VC_TASK_INDEX" in done.stderr


def test_the_environment_of_a_device_is_read_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "set_env.sh").write_text('export PATH="$PATH$NOT_THERE_YET"\nexport PROCESSOR_ADDR=from-set-env\n')
    environ = {**_variables("pytorchjob-ascend", "Master"), **MASTER, "RANK": "0"}
    done = _run_command(tmp_path, {**environ, "SET_ENV": str(tmp_path / "set_env.sh")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "from-set-env"


PYTHON = """#!/bin/sh
case "$*" in
-c*) echo /site/taskd ;;
*/manager.py) echo "manager $MASTER_ADDR $PROCESSOR_ADDR $LD_PRELOAD" > "$NOTES" ;;
*) printf "%s\\n" "$MASTER_ADDR" "$PROCESSOR_ADDR" "$PPID" "$@" ;;
esac
"""


@pytest.mark.parametrize("node", ["0", "1"])
def test_under_mindcluster_the_first_node_runs_the_manager_beside_its_launcher(tmp_path: Path, node: str) -> None:
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "set_env.sh").write_text("")
    environ = {**_variables("mindcluster", "Master"), "MASTER_ADDR": "10.96.0.7", "MASTER_PORT": "2222", "RANK": node}
    notes = tmp_path / "notes"
    here = {"SET_ENV": str(tmp_path / "set_env.sh"), "NOTES": str(notes)}
    done = _run_script("mindcluster", tmp_path, {**environ, **here})
    assert done.returncode == 0, done.stderr
    address = POD_IP if node == "0" else "10.96.0.7"
    master, processor_address, parent, script, *words = done.stdout.splitlines()
    assert (master, processor_address, parent) == (address, address, str(os.getpid()))
    assert Path(script).resolve() == manifests.MANIFESTS / "mindcluster" / "torchrun.py"
    assert words[:10:2] == ["--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port"]
    assert words[1:10:2] == ["2", node, "8", address, "2222"]
    assert words[10:] == [environ["SCRIPT"], *_arguments()]
    if node == "0":
        library = "/site/taskd/python/cython_api/libs/libtaskd.so"
        assert notes.read_text().split() == ["manager", POD_IP, POD_IP, library]
    else:
        assert not notes.exists()


@pytest.mark.parametrize("script", sorted(manifests.MANIFESTS.rglob("*.sh")), ids=lambda path: path.parent.name)
def test_scripts_are_good_shell(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", sorted(manifests.MANIFESTS.rglob("*.py")), ids=lambda path: path.name)
def test_scripts_are_good_python(script: Path) -> None:
    compile(script.read_text(encoding="utf-8"), str(script), "exec")


# ---------------------------------------------------------------- the page


@every_replica
def test_the_page_tells_of_every_variable(folder: str, role: str) -> None:
    rows = set(re.findall(r"`([A-Z_]+)`", "".join(re.findall(r"^\|([^|]*)\|", DOCUMENT, re.MULTILINE))))
    assert set(_variables(folder, role)) <= rows


@every_folder
def test_the_page_tells_how_each_folder_is_used(folder: str) -> None:
    assert f"launch/kubernetes/{folder}" in DOCUMENT


def test_the_page_makes_the_secret_of_the_keys() -> None:
    for folder, role in REPLICAS:
        replica, environ = _replica(folder, role), _variables(folder, role)
        mounts = {mount["name"]: mount["mountPath"] for mount in manifests.container(replica)["volumeMounts"]}
        secrets = [volume for volume in replica["template"]["spec"]["volumes"] if "secret" in volume]
        # ttprun makes keys of its own at every start; a controller that TaskD runs has none but those of a file.
        assert len(secrets) == ("TFT_KEYS" in environ) == (folder == "mindcluster")
        for volume in secrets:
            path = Path(environ["TFT_KEYS"])
            assert mounts[volume["name"]] == str(path.parent)
            assert f"mindio-tft keys {path.name}" in DOCUMENT
            assert f"create secret generic {volume['secret']['secretName']} --from-file={path.name}" in DOCUMENT
