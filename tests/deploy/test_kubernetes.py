"""The manifests for Kubernetes: valid, of one piece with the code that they start, and run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import ProxyHandler, build_opener

import httpx
import kubernetes_validate
import openai
import pytest
import typer.main
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families

from slipstream.bundled import target_dir
from slipstream.client import AsyncClient
from slipstream.common.wire.job import JobState
from slipstream.door.config import DoorConfig
from slipstream.door.main import door
from slipstream.gateway.config import GatewayConfig
from slipstream.gateway.main import gateway
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.main import scheduler
from slipstream.services.command_line import draft, verify
from slipstream.services.grammar.config import GrammarConfig
from slipstream.services.grammar_main import grammar
from slipstream.services.worker.config import WorkerConfig
from tests.harness.certificates import Certificates
from tests.harness.compose_files import DEPLOY, scraped
from tests.harness.generation_server import text_of, tokens_of
from tests.harness.kustomize import containers, one_of, render
from tests.harness.pods import Images, Pod

OVERLAYS = ("cpu", "gpu", "two-gpus", "openai", "inference-pool")
VERSION = "1.37"
CUSTOM = {"PodMonitor", "InferencePool", "HTTPRoute"}
"""Kinds that Kubernetes itself does not have."""
FIELDS = json.loads(Path(__file__).with_name("custom_resources.json").read_text(encoding="utf-8"))
"""Their apiVersion, and the fields that manifests use, with the bounds of the definition that `source` names."""
COMMANDS: dict[str, tuple[Any, type]] = {
    "verify": (verify, WorkerConfig),
    "draft": (draft, WorkerConfig),
    "grammar": (grammar, GrammarConfig),
    "scheduler": (scheduler, SchedulerConfig),
    "gateway": (gateway, GatewayConfig),
    "door": (door, DoorConfig),
}
KEY = "a-token-of-a-caller"
IMAGES = bool(os.environ.get("POD_IMAGES"))
"""True: pods run in the images of `make images`, as in `make test-all`. False: with this tree's programs."""
COMPATIBLE = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}
COMPATIBLE |= {"vllm:cache_config_info"}
CONTAINER = "__meta_kubernetes_pod_container_name"
BUNDLED_IN_IMAGE = "/opt/slipstream/bundled"

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def rendered(overlay: str) -> list[dict[str, Any]]:
    """The resources of an overlay."""
    return render(DEPLOY / "kubernetes" / overlay)


def options(container: dict[str, Any]) -> dict[str, Any]:
    """A container's command line, read by the code that it is for, and its settings, checked."""
    program, *words = container["command"]
    function, kind = COMMANDS[container["name"]]
    assert program == f"slipstream-{container['name']}"
    command_line = typer.Typer()
    command_line.command()(function)
    words = [word.replace(BUNDLED_IN_IMAGE, str(target_dir().parent)) for word in words]
    found = dict(typer.main.get_command(command_line).make_context(program, words).params)
    names = {field.name for field in dataclasses.fields(kind)}
    kind(**{name: value for name, value in found.items() if name in names})
    return found


@each_overlay
def test_resources_are_valid(overlay: str) -> None:
    for resource in rendered(overlay):
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, VERSION, strict=True)
        else:
            assert complaints(resource) == []
    broken = rendered(overlay)
    one_of(broken, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(one_of(broken, "StatefulSet"), VERSION, strict=True)


def complaints(resource: dict[str, Any]) -> list[str]:
    """What is wrong with a resource of `CUSTOM`, by those fields of its definition that are in `FIELDS`."""
    schema = deepcopy(FIELDS[resource["kind"]]["spec"]) | {name: FIELDS[name] for name in ("port", "name", "duration")}
    errors = [error.message for error in Draft202012Validator(_closed(schema)).iter_errors(resource["spec"])]
    if resource["apiVersion"] != FIELDS[resource["kind"]]["apiVersion"]:
        errors.append(resource["apiVersion"])
    return errors


def _closed(schema: Any) -> Any:
    """Refuses fields that an object's schema does not name."""
    if isinstance(schema, dict):
        for inner in schema.values():
            _closed(inner)
        if isinstance(schema.get("properties"), dict) and "type" not in schema:
            schema |= {"type": "object", "additionalProperties": False}
    elif isinstance(schema, list):
        for inner in schema:
            _closed(inner)
    return schema


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("InferencePool", ["appProtocol"], "grpc"),
        ("InferencePool", ["endpointPickerRef", "portNumber"], 9002),
        ("HTTPRoute", ["rules", 0, "timeouts", "request"], "0"),
        ("HTTPRoute", ["rules", 0, "backendRefs", 0, "names"], "slipstream"),
        ("PodMonitor", ["podMetricsEndpoints", 0, "relabeling"], []),
        ("PodMonitor", ["podMetricsEndpoints", 0, "port"], 9404),
    ],
)
def test_custom_resources_with_a_wrong_field_are_refused(kind: str, path: list[Any], value: object) -> None:
    broken = deepcopy(one_of(rendered("inference-pool"), kind))
    place: Any = broken["spec"]
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert len(complaints(broken)) == 1


@each_overlay
def test_containers_start_what_there_is(overlay: str) -> None:
    """Each option exists, each service finds the other, and each port that is named is served."""
    by_name = {one["name"]: one for one in containers(one_of(rendered(overlay), "StatefulSet"))}
    assert set(by_name) - {"door", "mps"} == {"verify", "draft", "grammar", "scheduler", "gateway"}
    assert ("mps" in by_name, "door" in by_name) == (_variant(overlay) == "gpu", overlay in OVERLAYS[3:])
    found = {name: options(one) for name, one in by_name.items() if name != "mps"}
    assert found["scheduler"]["verify"] == found["verify"]["listen"]
    assert found["scheduler"]["draft"] == found["draft"]["listen"]
    assert found["scheduler"]["grammar"] == found["grammar"]["listen"]
    assert found["gateway"]["scheduler"] == found["scheduler"]["listen"]
    for name, given in found.items():
        served = {int(given["listen"].rpartition(":")[2])} if name in ("gateway", "door") else set()
        ports = {port["containerPort"] for port in by_name[name]["ports"]}
        assert ports == {given["metrics_port"], *served}
    if "door" in found:
        assert found["door"]["gateway"] == found["gateway"]["listen"].replace("0.0.0.0", "127.0.0.1")
    for name, one in by_name.items():
        assert one["image"] == (
            "slipstream:gateway" if name in ("gateway", "door") else f"slipstream:{_variant(overlay)}"
        )
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def _variant(overlay: str) -> str:
    return "cpu" if overlay in ("cpu", "openai") else "gpu"


@each_overlay
def test_a_pod_ends_within_its_grace(overlay: str) -> None:
    pod = one_of(rendered(overlay), "StatefulSet")["spec"]["template"]["spec"]
    drains = [one["lifecycle"]["preStop"]["sleep"]["seconds"] + options(one)["grace_s"] for one in pod["containers"]]
    (sidecar,) = (one for one in pod["initContainers"] if one["name"] == "scheduler")
    assert max(drains) + options(sidecar)["grace_s"] + 10 <= pod["terminationGracePeriodSeconds"]


@each_overlay
def test_what_selects_pods_finds_them(overlay: str) -> None:
    resources = rendered(overlay)
    template = one_of(resources, "StatefulSet")["spec"]["template"]
    labels, ports, names = template["metadata"]["labels"], {}, {}
    for one in containers(one_of(resources, "StatefulSet")):
        ports |= {port["name"]: port["containerPort"] for port in one.get("ports", ())}
        names |= {port["name"]: one["name"] for port in one.get("ports", ())}
    for resource in resources:
        spec = resource.get("spec", {})
        selector = spec.get("selector", {})
        wanted = selector.get("matchLabels", selector)
        assert wanted.items() <= labels.items(), resource["kind"]
        if resource["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= set(ports)
    endpoints = one_of(resources, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert {endpoint["relabelings"][0]["sourceLabels"][0] for endpoint in endpoints} == {CONTAINER}
    jobs = {
        endpoint["relabelings"][0]["replacement"].replace("$1", names[endpoint["port"]]): endpoint["port"]
        for endpoint in endpoints
    }
    asked = {job: int(static["targets"][0].rpartition(":")[2]) for job, static in scraped().items()}
    assert {job: ports[port] for job, port in jobs.items()} == asked
    if overlay == "inference-pool":
        pool, route = one_of(resources, "InferencePool")["spec"], one_of(resources, "HTTPRoute")["spec"]
        assert [port["number"] for port in pool["targetPorts"]] == [ports["openai"]]
        assert route["rules"][0]["backendRefs"][0]["name"] == "slipstream"


@each_overlay
def test_applied_again_the_manifests_leave_the_number_of_pods_alone(overlay: str) -> None:
    resources = rendered(overlay)
    target = one_of(resources, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert "replicas" not in one_of(resources, target["kind"], target["name"])["spec"]


@pytest.mark.parametrize(("overlay", "count"), [("gpu", 1), ("two-gpus", 2)])
def test_all_that_compute_have_the_pod_s_gpus(overlay: str, count: int) -> None:
    resources = rendered(overlay)
    pod = one_of(resources, "StatefulSet")["spec"]["template"]["spec"]
    (claim,) = pod["resourceClaims"]
    template = one_of(resources, "ResourceClaimTemplate", claim["resourceClaimTemplateName"])
    (asked,) = template["spec"]["spec"]["devices"]["requests"]
    assert asked["exactly"].get("count", 1) == count
    of_verify = {entry["name"]: entry["value"] for entry in pod["initContainers"][1]["env"]}
    assert of_verify.get("SLIPSTREAM_TENSOR_PARALLEL_SIZE", "1") == str(count)
    assert [one["name"] for one in pod["initContainers"]] == ["mps", "verify", "draft", "grammar", "scheduler"]
    pipes = {}
    for one in (one for one in pod["initContainers"] if one["name"] != "grammar"):
        assert one["resources"]["claims"] == [{"name": claim["name"]}]
        pipes[one["name"]] = {entry["name"]: entry["value"] for entry in one["env"]}["CUDA_MPS_PIPE_DIRECTORY"]
    assert pipes["mps"] == pipes["verify"] == pipes["draft"] != pipes["scheduler"]
    without = [*pod["containers"], *(one for one in pod["initContainers"] if one["name"] == "grammar")]
    assert not any("claims" in one["resources"] for one in without)


REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "class Queue:", "max_new_tokens": 120, "ignore_eos": True},
    {"prompt": "def parse(text):", "max_new_tokens": 120, "temperature": 0.9, "seed": 3, "ignore_eos": True},
)


async def output_of(client: AsyncClient, request: dict[str, Any]) -> tuple[list[int], str]:
    """The tokens and the text of a request."""
    chunks = [chunk async for chunk in client.generate(**request)]
    return tokens_of(chunks), text_of(chunks)


def secured(statefulset: dict[str, Any], files: Certificates, directory: Path) -> None:
    """Gives the pods a public door that has TLS, and a file of keys, as docs/security.md says."""
    keys = directory / "keys"
    keys.write_text(f"caller:{KEY}\n", encoding="utf-8")
    for path in (keys, files.key):
        path.chmod(0o600)
        if IMAGES:
            os.chown(path, 10001, 10001)
    place = "/etc/slipstream"
    statefulset["spec"]["template"]["spec"]["volumes"].append({"name": "keys", "hostPath": {"path": str(directory)}})
    for one in containers(statefulset):
        one["volumeMounts"] = [*one["volumeMounts"], {"name": "keys", "mountPath": place}]
        if one["name"] == "gateway":
            one["command"].append(f"--api-keys={place}/{keys.name}")
        if one["name"] == "door":
            one["command"].remove("--insecure-public")
            one["command"] += ["--asks-for-keys"]
            one["command"] += [f"--tls-cert={place}/{files.cert.name}", f"--tls-key={place}/{files.key.name}"]
            for probe in ("startupProbe", "readinessProbe"):
                one[probe]["httpGet"]["scheme"] = "HTTPS"


def openai_client(pod: Pod, files: Certificates, key: str = KEY) -> openai.AsyncOpenAI:
    """A client of a pod's door."""
    trusted = ssl.create_default_context(cafile=str(files.ca))
    trusted.check_hostname = False  # a pod of this test has an address of its own
    http = httpx.AsyncClient(verify=trusted, trust_env=False)
    return openai.AsyncOpenAI(base_url=f"https://{pod.ip}:8000/v1", api_key=key, max_retries=0, http_client=http)


async def completion(client: openai.AsyncOpenAI) -> str:
    """The text of the first of `REQUESTS`."""
    answer = await client.completions.create(
        model="target",
        prompt=REQUESTS[0]["prompt"],
        max_tokens=REQUESTS[0]["max_new_tokens"],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].text


def scraped_names(pod: Pod) -> set[str]:
    """The names on the page of the pod's gateway."""
    with build_opener(ProxyHandler({})).open(f"http://{pod.ip}:9404/metrics", timeout=10) as answer:
        return {
            sample.name
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
        }


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_rolling_update_under_load_fails_no_request(tmp_path: Path) -> None:
    """Two pods, each ended and started again, while clients stream by gRPC, and OpenAI's by doors with TLS and keys.

    gRPC's clients have both addresses; OpenAI's choose a pod that is ready, as a Service does, which hears of an end a
    second late. Jobs are back with the pod. `tests/harness/pods.py` says what of a kubelet it does not do.
    """
    statefulset, scaling = (one_of(rendered("openai"), kind) for kind in ("StatefulSet", "HorizontalPodAutoscaler"))
    (keys := tmp_path / "secrets").mkdir()
    files = Certificates(keys)
    secured(statefulset, files, keys)
    with TemporaryDirectory() as directory, ThreadPoolExecutor(4) as threads, ExitStack() as entered:
        images = entered.enter_context(Images()) if IMAGES else None
        ordinals = range(scaling["spec"]["minReplicas"])
        pods = [Pod(statefulset, ordinal, Path(directory), images) for ordinal in ordinals]
        loop = asyncio.get_running_loop()
        try:
            await asyncio.gather(*(loop.run_in_executor(threads, pod.start) for pod in pods))
            for pod in pods:
                assert all((await loop.run_in_executor(threads, pod.live)).values())
            assert scraped_names(pods[0]) >= COMPATIBLE
            async with AsyncExitStack() as held:
                client = await held.enter_async_context(AsyncClient([pod.address for pod in pods], api_key=KEY))
                doors = {pod: await held.enter_async_context(openai_client(pod, files)) for pod in pods}
                stranger = await held.enter_async_context(openai_client(pods[0], files, "wrong"))
                with pytest.raises(openai.AuthenticationError):
                    await completion(stranger)
                expected = [await output_of(client, request) for request in REQUESTS]
                outputs: list[tuple[int, tuple[list[int], str]]] = []
                is_updated = asyncio.Event()

                async def load(number: int) -> None:
                    while not is_updated.is_set():
                        outputs.append((number, await output_of(client, REQUESTS[number])))

                ready, texts = list(pods), []

                async def load_doors() -> None:
                    while not is_updated.is_set():
                        texts.append(await completion(doors[ready[len(texts) % len(ready)]]))

                clients = [asyncio.create_task(load(number)) for number in range(len(REQUESTS))]
                clients += [asyncio.create_task(load_doors()) for _ in range(2)]
                for pod in reversed(pods):
                    async with AsyncClient(pod.address, api_key=KEY) as own:
                        await own.create_job(**REQUESTS[0], job_id="kept")
                        loop.call_later(1.0, ready.remove, pod)
                        assert await loop.run_in_executor(threads, pod.delete) == []
                        await loop.run_in_executor(threads, pod.start)
                        ready.append(pod)
                        watched = [chunk async for chunk in own.watch_job("kept")]
                        assert (tokens_of(watched), text_of(watched)) == expected[0]
                        assert (await own.get_job("kept")).state is JobState.ENDED
                is_updated.set()
                await asyncio.gather(*clients)
            assert len(outputs) > len(REQUESTS)
            assert all(output == expected[number] for number, output in outputs)
            assert set(texts) == {expected[0][1]}
        finally:
            for pod in pods:
                pod.close()


def test_the_renderer_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("namePrefix: a-\nresources: []\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="namePrefix"):
        render(tmp_path)
