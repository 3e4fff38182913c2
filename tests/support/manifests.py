"""The Kubernetes manifests of launch/kubernetes: rendered as `kubectl kustomize` does, and checked against schemas.

Schemas of Kubernetes' own kinds come with the package kubernetes-validate (strict: unknown fields are errors). Those of
the job kinds are in support/schemas; for pods they refer to Kubernetes' own.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from referencing import Registry, Resource

Document = dict[str, Any]

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "launch" / "kubernetes"
_SCHEMAS = Path(__file__).with_name("schemas")
_JOB_SCHEMAS = {
    ("kubeflow.org/v1", "PyTorchJob"): "pytorchjob.json",
    ("batch.volcano.sh/v1alpha1", "Job"): "volcano-job.json",
    ("mindxdl.gitee.com/v1", "AscendJob"): "ascendjob.json",
}
JOB_KINDS = frozenset(kind for _, kind in _JOB_SCHEMAS)
_KUSTOMIZATION = frozenset({"apiVersion", "kind", "resources", "configMapGenerator", "generatorOptions", "patches"})


# ---------------------------------------------------------------- rendering


def folders() -> list[str]:
    """Folders of jobs, each of which `kubectl apply -k` takes."""
    return sorted(path.parent.name for path in MANIFESTS.glob("*/kustomization.yaml") if path.parent.name != "common")


def render(folder: Path) -> list[Document]:
    """The documents of a folder with a kustomization.yaml, as far as ours need kustomize.

    Raises:
        ValueError: the file uses something that is not rendered here.
    """
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if unknown := set(kustomization) - _KUSTOMIZATION:
        raise ValueError(f"{folder.name}/kustomization.yaml uses {', '.join(sorted(unknown))}")
    documents: list[Document] = []
    for name in kustomization.get("resources", []):
        place = (folder / name).resolve()
        documents += render(place) if place.is_dir() else read(place)
    for generator in kustomization.get("configMapGenerator", []):
        if kustomization.get("generatorOptions") != {"disableNameSuffixHash": True}:
            raise ValueError(f"{folder.name}: the name of a ConfigMap would change, and pods would not find it")
        data = {Path(name).name: (folder / name).read_text(encoding="utf-8") for name in generator["files"]}
        metadata = {"name": generator["name"]}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for patch in kustomization.get("patches", []):
        _patch(documents, patch["target"], read(folder / patch["path"])[0])
    return documents


def read(path: Path) -> list[Any]:
    """The documents in a file."""
    # Through JSON: what YAML's anchors share must be separate, as after an upload.
    documents = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return [json.loads(json.dumps(document)) for document in documents if document is not None]


def _patch(documents: list[Document], target: Mapping[str, str], operations: list[Mapping[str, Any]]) -> None:
    """Apply a JSON patch (RFC 6902: add, remove) to the documents that are meant."""
    meant = [
        document
        for document in documents
        if document["kind"] == target["kind"] and document["apiVersion"].partition("/")[0] == target["group"]
    ]
    if len(meant) != 1:
        raise ValueError(f"{len(meant)} documents are {target}")
    for operation in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = meant[0]
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if operation["op"] == "remove":
            del place[last]
        elif operation["op"] == "add" and last == "-":
            place.append(copy.deepcopy(operation["value"]))
        elif operation["op"] == "add" and isinstance(place, dict):
            place[last] = copy.deepcopy(operation["value"])
        else:
            raise ValueError(f"{operation['op']} {operation['path']} is not rendered here")


# ---------------------------------------------------------------- schemas


@functools.cache
def _kubernetes_version() -> str:
    return str(kubernetes_validate.latest_version())


@functools.cache
def _job_validator(file: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((_SCHEMAS / file).read_text(encoding="utf-8"))
    definitions = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    definitions /= f"v{_kubernetes_version()}-local-strict/_definitions.json"
    kubernetes = Resource.from_contents(json.loads(definitions.read_text(encoding="utf-8")))
    registry: Registry[Any] = kubernetes @ Registry()
    return jsonschema.Draft202012Validator(schema, registry=registry)


def problems(document: Document) -> list[str]:
    """What the schema of a document's kind does not allow.

    Raises:
        SchemaNotFoundError: Kubernetes has no such kind.
    """
    name = f"{document['kind']} {document['metadata']['name']}"
    schema = _JOB_SCHEMAS.get((document["apiVersion"], document["kind"]))
    if schema is not None:
        errors = list(_job_validator(schema).iter_errors(document))
        return [f"{name}: {'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
    try:
        kubernetes_validate.validate(document, _kubernetes_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{name}: {'.'.join(map(str, error.path))}: {error.message}"]
    return []


# ---------------------------------------------------------------- what jobs consist of


def job_of(documents: list[Document]) -> Document:
    """The job among the documents of a folder."""
    (job,) = (document for document in documents if document["kind"] in JOB_KINDS)
    return job


def roles(job: Document) -> dict[str, Document]:
    """Replicas of a job by role: Master and Worker, or the one task of Volcano."""
    spec = job["spec"]
    replicas: dict[str, Document] = spec.get("pytorchReplicaSpecs") or spec.get("replicaSpecs") or {}
    return replicas or {task["name"]: task for task in spec["tasks"]}


def container(replica: Document) -> Document:
    """The only container of a replica's pods."""
    (only,) = replica["template"]["spec"]["containers"]
    return dict(only)


def variables(replica: Document, fields: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a replica's container.

    fields: values of a pod's fields, such as status.podIP.
    """
    return {
        entry["name"]: entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container(replica)["env"]
    }
