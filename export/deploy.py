"""Manifests that serve an exported folder by vLLM on a cluster, and the job that audits it.

Kubernetes alone, Dynamo and llm-d differ in who routes requests to the replicas. All have one form
of job: it waits until each replica is ready, then asks through the router, and adds up the
replicas' counters, which a headless service of theirs finds.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdec.errors import Problems, SpecDecError

from .runtimes import configure_vllm
from .settings import ExportSettings
from .source import TITLES, Order

SERVE_FILE, AUDIT_FILE, VALUES_FILE = "deploy.yaml", "audit.yaml", "router-values.yaml"
MOUNT = "/models"  # where the claim with the models is mounted
MAX_NAME = 40  # characters of the resources' name, which suffixes make longer
TOKEN_SECRET = "hf-token-secret"  # noqa: S105 - the name of a secret, which Dynamo's pages use too
VLLM_IMAGE = "vllm/vllm-openai:v0.32.0"
DYNAMO_IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.0"
ROUTER_CHART = "oci://ghcr.io/llm-d/charts/llm-d-router-standalone"
VLLM_PORT, DYNAMO_PORT, ENVOY_PORT = 8000, 9090, 8081
AUDIT_SECONDS = 7200  # the most that the job may take, the start of the replicas included
# Ready replicas are the addresses of their headless service; the job waits for all of them.
AUDIT_SCRIPT = """\
list_replicas() { getent ahostsv4 "$REPLICAS_HOST" | cut -d ' ' -f 1 | sort -u; }
until [ "$(list_replicas | wc -l)" -ge "$NUM_REPLICAS" ]; do sleep 5; done
until python3 -c 'import os, urllib.request as r; r.urlopen(os.environ["BASE_URL"] + "/models")'
do sleep 5; done
for address in $(list_replicas); do set -- "$@" "http://$address:$METRICS_PORT/metrics"; done
exec specdec audit --base-url "$BASE_URL" --model "$MODEL" --json --metrics-url "$@"
"""

Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """Facts that all manifests of a folder share.

    name: of the resources. target: the model that vLLM serves, a Hub id or a mounted folder.
    model: its name in requests. drafter: the exported folder where it is mounted.
    """

    settings: ExportSettings
    name: str
    target: str
    model: str
    drafter: str
    speculative: Mapping[str, Any]
    has_proposer: bool

    @property
    def labels(self) -> dict[str, str]:
        """Labels by which services find the replicas; those of Dynamo's are its operator's."""
        if self.settings.deploy == "dynamo":
            prefix = "nvidia.com/dynamo"
            return {
                f"{prefix}-graph-deployment-name": self.name,
                f"{prefix}-component-type": "worker",
            }
        return {"app.kubernetes.io/name": self.name, "app.kubernetes.io/component": "replica"}

    @property
    def is_mounted(self) -> bool:
        """True where the target lies in the claim, too."""
        return self.target.startswith(f"{MOUNT}/")


def write_deployment(order: Order) -> dict[str, str]:
    """Return the files of --deploy with their texts, or raise SpecDecError."""
    deployment = _describe(order)
    system = SYSTEMS[str(order.settings.deploy)]
    url, port, manifests = system.write(deployment)
    manifests.append(_make_service(f"{deployment.name}-replicas", deployment, port, headless=True))
    texts = {
        SERVE_FILE: _write_yaml(manifests),
        AUDIT_FILE: _write_yaml([_make_audit(deployment, url, port)]),
    }
    if order.settings.deploy == "llm-d":
        texts[VALUES_FILE] = _write_yaml([_make_router_values(deployment)])
    return texts


def _write_yaml(documents: list[Manifest]) -> str:
    """Return documents as YAML: without anchors, and texts of several lines as they are."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Dumper of manifests as people write them."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent_text)
    text: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=100)
    return text


def describe_deployment(order: Order) -> list[str]:
    """Return README.md's lines about the manifests: the commands, and what has to be there."""
    deployment = _describe(order)
    name, settings = deployment.name, order.settings
    mounted = f"`{Path(order.output_path).name}`"
    if deployment.is_mounted:
        mounted += f" and `{Path(deployment.target).name}`"
    lines = [
        "", f"## {SYSTEMS[str(settings.deploy)].title}", "",
        f"Copy {mounted} into the volume of the claim `{settings.storage}`, then:", "", "```",
        f"kubectl apply -f {SERVE_FILE}",
    ]  # fmt: skip
    if settings.deploy == "llm-d":
        lines.append(f"helm install {name} {ROUTER_CHART} --version v0 -f {VALUES_FILE}")
    lines += [
        f"kubectl apply -f {AUDIT_FILE}",
        f"kubectl wait --for=condition=complete --timeout={AUDIT_SECONDS}s job/{name}-audit",
        "```", "",
        f"The job is the gate: it fails where the audit finds a fault, and `kubectl logs job/{name}"
        "-audit` has the report. Run it before others use the server, whose counters it reads. To"
        f" run it again, delete it first: `kubectl delete job {name}-audit`.",
    ]  # fmt: skip
    if not deployment.is_mounted:
        lines += ["", f"A gated target needs the secret `{TOKEN_SECRET}` with the key `HF_TOKEN`."]
    return lines


def _describe(order: Order) -> Deployment:
    """Return what the manifests share; raise SpecDecError where the folder cannot be deployed."""
    settings, kind = order.settings, order.source.kind
    problems = Problems()
    if kind == "plain" or settings.model_dir is None:
        problems.add(
            f"--deploy needs the target, and {TITLES[kind]} comes without one",
            "export a drafter, and give its target as --model-dir",
        )
    if kind == "redrafter" and settings.deploy == "dynamo":
        problems.add(
            "--deploy dynamo does not take a ReDrafter drafter: its proposer class is for vLLM"
            " 0.32, and Dynamo's images hold vLLM's of their own choice",
            "take --deploy k8s or --deploy llm-d",
        )
    problems.raise_all()
    folder = Path(order.output_path).resolve().name
    name = re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > MAX_NAME:
        raise SpecDecError(
            f"{folder!r} gives no name for resources of Kubernetes: a letter, then letters, digits"
            f" and hyphens, {MAX_NAME} at most",
            "choose another name for --output-dir",
        )
    drafter = f"{MOUNT}/{folder}"
    speculative = dict(configure_vllm(order))
    if speculative.get("model") == order.output_path:
        speculative["model"] = drafter
    base = str(settings.model_dir)
    is_local = Path(base).exists()
    target = f"{MOUNT}/{Path(base).resolve().name}" if is_local else base
    return Deployment(
        settings=settings, name=name, target=drafter if kind == "mtp" else target,
        model=Path(base).resolve().name if is_local else base, drafter=drafter,
        speculative=speculative, has_proposer=kind == "redrafter",
    )  # fmt: skip


# ---- Parts of the manifests.


def _list_options(deployment: Deployment) -> list[str]:
    """Return the options of vLLM that follow the model's name."""
    options = ["--served-model-name", deployment.model]
    if deployment.settings.gpus > 1:
        options += ["--tensor-parallel-size", str(deployment.settings.gpus)]
    if deployment.has_proposer:
        options.append("--enforce-eager")
    return [*options, "--speculative-config", json.dumps(deployment.speculative)]


def _make_pod(
    deployment: Deployment, container: Manifest, labels: Mapping[str, str] | None = None
) -> Manifest:
    """Return the template of a replica's pod around its container's own fields."""
    mount = {"name": "models", "mountPath": MOUNT, "readOnly": True}
    whole = {
        **container,
        "resources": {"limits": {"nvidia.com/gpu": str(deployment.settings.gpus)}},
        "volumeMounts": [mount],
    }
    if deployment.has_proposer:
        whole["env"] = [{"name": "PYTHONPATH", "value": deployment.drafter}]
    if not deployment.is_mounted:
        whole["envFrom"] = [{"secretRef": {"name": TOKEN_SECRET, "optional": True}}]
    claim = {"claimName": deployment.settings.storage, "readOnly": True}
    volumes = [{"name": "models", "persistentVolumeClaim": claim}]
    pod: Manifest = {} if labels is None else {"metadata": {"labels": dict(labels)}}
    return {**pod, "spec": {"containers": [whole], "volumes": volumes}}


def _make_vllm_pod(
    deployment: Deployment, labels: Mapping[str, str], container_name: str
) -> Manifest:
    """Return the template of a pod that runs `vllm serve`, with its probes."""
    health = {"httpGet": {"path": "/health", "port": "http"}}
    container = {
        "name": container_name,
        "image": deployment.settings.image or VLLM_IMAGE,
        "command": ["vllm", "serve"],
        "args": [deployment.target, "--port", str(VLLM_PORT), *_list_options(deployment)],
        "ports": [{"name": "http", "containerPort": VLLM_PORT}],
        "startupProbe": {**health, "periodSeconds": 15, "failureThreshold": 240},
        "readinessProbe": {**health, "periodSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**health, "periodSeconds": 10, "failureThreshold": 6},
    }
    pod = _make_pod(deployment, container, labels)
    # The GPUs of a replica exchange their partial sums through shared memory.
    memory = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    pod["spec"]["volumes"].append(memory)
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    return pod


def _make_replicas(deployment: Deployment, pod: Manifest) -> Manifest:
    """Return the Deployment that keeps the replicas running."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": deployment.name, "labels": deployment.labels},
        "spec": {
            "replicas": deployment.settings.replicas,
            "selector": {"matchLabels": deployment.labels},
            "template": pod,
        },
    }


def _make_service(
    name: str, deployment: Deployment, port: int, *, headless: bool = False
) -> Manifest:
    """Return a service of the replicas; a headless one has an address for each ready replica."""
    spec: Manifest = {"selector": deployment.labels, "ports": [{"name": "http", "port": port}]}
    if headless:
        spec = {"clusterIP": "None", **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _make_audit(deployment: Deployment, url: str, port: int) -> Manifest:
    """Return the job that audits the server through its router. url: where the router listens."""
    environment = {
        "BASE_URL": url, "MODEL": deployment.model,
        "REPLICAS_HOST": f"{deployment.name}-replicas",
        "NUM_REPLICAS": str(deployment.settings.replicas), "METRICS_PORT": str(port),
    }  # fmt: skip
    container = {
        "name": "audit",
        "image": deployment.settings.audit_image,
        "command": ["/bin/sh", "-euc", AUDIT_SCRIPT],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{deployment.name}-audit"},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": AUDIT_SECONDS,
            "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
        },
    }


# ---- Systems. Each writer returns the router's URL, the port of the metrics, and the manifests.

Written = tuple[str, int, list[Manifest]]


def _write_kubernetes(deployment: Deployment) -> Written:
    """Return a Deployment behind a Service, which spreads connections over the replicas."""
    pod = _make_vllm_pod(deployment, deployment.labels, "vllm")
    manifests = [
        _make_replicas(deployment, pod),
        _make_service(deployment.name, deployment, VLLM_PORT),
    ]
    return f"http://{deployment.name}:{VLLM_PORT}/v1", VLLM_PORT, manifests


def _write_dynamo(deployment: Deployment) -> Written:
    """Return a DynamoGraphDeployment: a frontend that routes, and workers with the drafter."""
    image = deployment.settings.image or DYNAMO_IMAGE
    worker = {
        "name": "main",  # the operator adds its defaults to the container of this name
        "image": image,
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": ["--model", deployment.target, *_list_options(deployment)],
    }
    # The frontend reads the tokenizer from the model's folder.
    frontend = _make_pod(deployment, {"name": "main", "image": image})
    del frontend["spec"]["containers"][0]["resources"]
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": deployment.name},
        "spec": {
            "components": [
                {"name": "Frontend", "type": "frontend", "replicas": 1, "podTemplate": frontend},
                {
                    "name": "VllmWorker",
                    "type": "worker",
                    "replicas": deployment.settings.replicas,
                    "podTemplate": _make_pod(deployment, worker),
                },
            ]
        },
    }
    return f"http://{deployment.name}-frontend:8000/v1", DYNAMO_PORT, [graph]


def _write_llm_d(deployment: Deployment) -> Written:
    """Return a Deployment that llm-d's router finds by a label; Helm installs the router."""
    labels = {**deployment.labels, **_find_pool(deployment)}
    pod = _make_vllm_pod(deployment, labels, "modelserver")
    return f"http://{deployment.name}-epp/v1", VLLM_PORT, [_make_replicas(deployment, pod)]


def _find_pool(deployment: Deployment) -> dict[str, str]:
    """Return the label by which the router finds its replicas."""
    return {"llm-d.ai/guide": deployment.name}


def _make_router_values(deployment: Deployment) -> Manifest:
    """Return the values of llm-d's router chart: its replicas, and port 80 of its proxy."""
    port = {"name": "http", "port": 80, "protocol": "TCP", "targetPort": ENVOY_PORT}
    servers = {
        "type": "vllm", "targetPorts": [{"number": VLLM_PORT}],
        "matchLabels": _find_pool(deployment),
    }  # fmt: skip
    return {"router": {"extraServicePorts": [port], "modelServers": servers}}


@dataclasses.dataclass(frozen=True)
class System:
    """System that places replicas and routes to them, with the writer of its manifests."""

    title: str
    write: Callable[[Deployment], Written]


SYSTEMS: Mapping[str, System] = {
    "k8s": System("Kubernetes", _write_kubernetes),
    "dynamo": System("Dynamo on Kubernetes", _write_dynamo),
    "llm-d": System("llm-d on Kubernetes", _write_llm_d),
}
