"""specdec-export --deploy: manifests that fit together, golden files, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.errors import SpecDecError, UsageError
from specdec.export.deploy import AUDIT_FILE, SERVE_FILE, VALUES_FILE, write_deployment
from specdec.export.pipeline import export_model
from specdec.export.settings import ExportSettings, check_settings
from specdec.export.source import Order, Source
from tests.conftest import make_drafter, make_eagle_drafter, make_llama
from tests.engines import call

GOLDENS = Path(__file__).with_name("deployments")
SYSTEMS = ("k8s", "dynamo", "llm-d")
IMAGE = "registry.example/specdec:0.1.0"


def make_order(checkpoint: Path, **settings: Any) -> Order:
    settings = {"deploy": "k8s", "audit_image": IMAGE, "model_dir": "org/target-70B"} | settings
    output = settings.pop("output_dir", Path("out/Llama_70B.eagle3"))
    return Order(
        settings=ExportSettings(to="vllm", output_dir=output, **settings),
        source=Source(checkpoint), target=settings["model_dir"] or "BASE", output_path=str(output),
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("deployed")
    base, made = make_llama(parent, layers=4, vocab=131), {}
    eagle = make_eagle_drafter(
        parent, vocab=131, version=3, aux_layers=(1, 2, 3), own_embedding=False
    )
    redrafter = make_drafter(parent, vocab=131, name="redrafter-source")
    for kind, options in (
        ("eagle3", ["--eagle-model-dir", eagle]), ("redrafter", ["--drafter-model-dir", redrafter]),
        ("plain", []),
    ):  # fmt: skip
        made[kind] = parent / kind
        call("convert", "--model-dir", base, *options, "--output-dir", made[kind])
    return {**made, "base": base, "drafter": eagle}


def list_pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    return [spec["template"]] if "template" in spec else [
        component["podTemplate"] for component in spec.get("components", ())
    ]  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_manifests(system: str, checkpoints: dict[str, Path]) -> None:
    """The golden files; and services, pods and the job name one another rightly."""
    texts = write_deployment(make_order(checkpoints["eagle3"], deploy=system, replicas=3, gpus=2))
    for name, text in texts.items():
        golden = GOLDENS / f"{system}-{name}"
        if os.environ.get("SPECDEC_WRITE_GOLDENS"):
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(text)
        assert text == golden.read_text(), f"{golden} differs"
    assert set(texts) == {SERVE_FILE, AUDIT_FILE} | ({VALUES_FILE} if system == "llm-d" else set())
    documents = list(yaml.safe_load_all(texts[SERVE_FILE]))
    (job,) = yaml.safe_load_all(texts[AUDIT_FILE])
    server = list_pods(documents[0])[-1]
    (container,) = server["spec"]["containers"]
    drafting = json.loads(container["args"][container["args"].index("--speculative-config") + 1])
    assert drafting == {
        "method": "eagle3", "model": "/models/Llama_70B.eagle3", "num_speculative_tokens": 3,
    }  # fmt: skip
    assert "org/target-70B" in container["args"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert container["envFrom"][0]["secretRef"]["optional"]
    (audit,) = job["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in audit["env"]}
    services = {document["metadata"]["name"]: document for document in documents[1:]}
    replicas = services[environment["REPLICAS_HOST"]]["spec"]
    assert replicas["clusterIP"] == "None"
    assert replicas["ports"][0]["port"] == int(environment["METRICS_PORT"])
    assert environment["NUM_REPLICAS"] == "3"
    if system != "dynamo":  # whose operator labels the pods
        labels = server["metadata"]["labels"]
        assert replicas["selector"].items() <= labels.items()
        assert documents[0]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    if system == "llm-d":
        values = yaml.safe_load(texts[VALUES_FILE])["router"]
        assert values["modelServers"]["matchLabels"].items() <= labels.items()
    if system == "k8s":
        assert services["llama-70b-eagle3"]["spec"]["selector"] == replicas["selector"]
    host = environment["BASE_URL"].removeprefix("http://").partition("/")[0].partition(":")[0]
    suffix = {"k8s": "", "dynamo": "-frontend", "llm-d": "-epp"}[system]
    assert host == f"llama-70b-eagle3{suffix}"


def test_the_job_waits_and_asks_every_replica(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The script itself, with doubles of getent, python3 and specdec, by the system's shell."""
    (job,) = yaml.safe_load_all(write_deployment(make_order(checkpoints["eagle3"]))[AUDIT_FILE])
    (audit,) = job["spec"]["template"]["spec"]["containers"]
    for name, lines in (
        ("getent", 'echo x >> calls; [ "$2" = llama-70b-eagle3-replicas ]\necho "10.0.0.7 STREAM"\n'
                   '[ "$(wc -l < calls)" -lt 3 ] || echo "10.0.0.9 STREAM"'),
        ("python3", "exit 0"), ("sleep", "exit 0"), ("specdec", 'printf "%s\\n" "$@"; exit 1'),
    ):  # fmt: skip
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
    environment = {entry["name"]: entry["value"] for entry in audit["env"]}
    ran = subprocess.run(
        audit["command"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env={**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert ran.stdout.split() == [
        "audit", "--base-url", "http://llama-70b-eagle3:8000/v1", "--model", "org/target-70B",
        "--json", "--metrics-url", "http://10.0.0.7:8000/metrics", "http://10.0.0.9:8000/metrics",
    ], ran.stderr  # fmt: skip
    assert ran.returncode == 1  # the audit's verdict is the job's


def test_other_drafters_and_targets(checkpoints: dict[str, Path]) -> None:
    """A ReDrafter's class is found in the volume; a local target lies beside the drafter."""
    order = make_order(checkpoints["redrafter"], model_dir=str(checkpoints["base"]))
    deployment = yaml.safe_load(write_deployment(order)[SERVE_FILE].partition("---")[0])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    name = checkpoints["base"].name
    assert container["args"][0] == f"/models/{name}"
    assert container["args"][4:6] == [name, "--enforce-eager"]
    assert container["env"] == [{"name": "PYTHONPATH", "value": "/models/Llama_70B.eagle3"}]
    assert "envFrom" not in container
    with pytest.raises(SpecDecError, match="does not take a ReDrafter drafter"):
        write_deployment(
            dataclasses.replace(
                order, settings=dataclasses.replace(order.settings, deploy="dynamo")
            )
        )
    with pytest.raises(SpecDecError, match="a model comes without one"):
        write_deployment(make_order(checkpoints["plain"]))
    with pytest.raises(SpecDecError, match="gives no name for resources"):
        write_deployment(make_order(checkpoints["eagle3"], output_dir=Path("out/70B")))


def test_the_folder_and_its_options(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The manifests lie in the folder, are in its manifest, and README.md has the commands."""
    settings = ExportSettings(
        model_dir=str(checkpoints["base"]), eagle_model_dir=str(checkpoints["drafter"]), to="vllm",
        output_dir=tmp_path / "drafter", deploy="llm-d", audit_image=IMAGE,
    )  # fmt: skip
    export_model(settings)
    readme = (tmp_path / "drafter" / "README.md").read_text()
    manifest = (tmp_path / "drafter" / "manifest.json").read_text()
    for name in (SERVE_FILE, AUDIT_FILE, VALUES_FILE):
        assert (tmp_path / "drafter" / name).is_file()
        assert name in readme
        assert f'"{name}"' in manifest
    for changes, fact in (
        ({"to": "sglang"}, "--deploy writes manifests of vLLM"),
        ({"audit_image": None}, "missing --audit-image"),
        ({"deploy": None}, "--audit-image has no effect without --deploy"),
        ({"deploy": None, "audit_image": None, "gpus": 2}, "--gpus has no effect without --deploy"),
    ):
        with pytest.raises(UsageError, match=fact):
            check_settings(dataclasses.replace(settings, **changes))
