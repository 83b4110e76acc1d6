"""Runs a pod of a rendered StatefulSet as processes of this host: a small part of what a kubelet does.

It starts each container's command with its env, its volumes as folders and its ports at an address of its own; sidecars
first, each when the startup probe of the one before it passes; runs the probes as they are written; and ends the pod as
a kubelet does: preStop, SIGTERM, the sidecars after the containers in reverse order, and SIGKILL after the grace.

It does none of this: images and their root file systems, users and rights, limits of memory, namespaces (/dev/shm, /tmp
and the processes are this host's), restarts of containers, endpoints of Services, claims of devices.
"""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.bundled import target_dir
from tests.harness.kustomize import Resource, containers

_BIN = Path(sys.executable).parent
_unverified = ssl.create_default_context()
_unverified.check_hostname, _unverified.verify_mode = False, ssl.CERT_NONE
_http = build_opener(ProxyHandler({}), HTTPSHandler(context=_unverified))
"""As a kubelet, which trusts every certificate of a pod."""
_HOSTS = ("/dev/shm", "/tmp")


class Pod:
    """A pod of the StatefulSet, by its ordinal. Blocks its callers."""

    def __init__(self, statefulset: Resource, ordinal: int, directory: Path) -> None:
        """`directory` keeps its claims. Nothing runs before `start`."""
        self._spec = statefulset["spec"]["template"]["spec"]
        self._claims = {claim["metadata"]["name"] for claim in statefulset["spec"]["volumeClaimTemplates"]}
        self._ordinal = ordinal
        self._directory = directory
        self._containers = containers(statefulset)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._num_starts = 0
        pid = os.getpid()
        self.ip = f"127.{1 + pid % 250}.{pid // 250 % 250}.{2 + ordinal}"
        """Its address; to the containers, loopback and every address of the pod."""

    @property
    def address(self) -> str:
        """The gateway's."""
        return f"{self.ip}:50051"

    def log(self, name: str) -> str:
        """What a container has written."""
        return (self._directory / f"{self._ordinal}-{name}.log").read_text(encoding="utf-8")

    def start(self) -> None:
        """Starts the containers; returns when the pod is ready. The test's timeout bounds it."""
        self._num_starts += 1
        for container in self._containers:
            self._run(container)
            if container.get("restartPolicy") == "Always":
                self._wait(container, "startupProbe")
        for container in self._spec["containers"]:
            self._wait(container, "startupProbe")
            self._wait(container, "readinessProbe")

    def probe(self, container: Resource, kind: str) -> bool:
        """Runs a probe once; True if there is none of this kind."""
        if (probe := container.get(kind)) is None:
            return True
        timeout_s = probe["timeoutSeconds"]
        try:
            if "exec" in probe:
                command = [self._here(word, container) for word in probe["exec"]["command"]]
                environment = {**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}"}
                done = subprocess.run(command, env=environment, timeout=timeout_s, capture_output=True, check=False)
                return done.returncode == 0
            if "grpc" in probe:
                with grpc.insecure_channel(f"{self.ip}:{probe['grpc']['port']}") as channel:
                    answer = health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(), timeout=timeout_s
                    )
                    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
            if "httpGet" in probe:
                get = probe["httpGet"]
                scheme = get.get("scheme", "HTTP").lower()
                with _http.open(f"{scheme}://{self.ip}:{get['port']}{get['path']}", timeout=timeout_s) as answer:
                    return bool(answer.status == 200)
            with socket.create_connection((self.ip, probe["tcpSocket"]["port"]), timeout_s):
                return True
        except (OSError, grpc.RpcError, subprocess.TimeoutExpired):
            return False

    def live(self) -> dict[str, bool]:
        """The result of each container's liveness probe."""
        return {container["name"]: self.probe(container, "livenessProbe") for container in self._containers}

    def delete(self) -> list[str]:
        """Ends the pod; returns the containers that had to be killed because its grace was over."""
        ends_at = time.monotonic() + self._spec["terminationGracePeriodSeconds"]
        main = [container["name"] for container in self._spec["containers"]]
        time.sleep(max(one["lifecycle"]["preStop"]["sleep"]["seconds"] for one in self._spec["containers"]))
        sidecars = [[container["name"]] for container in reversed(self._spec["initContainers"])]
        killed = []
        for names in (main, *sidecars):
            for name in names:
                self._processes[name].terminate()
            for name in names:
                try:
                    self._processes[name].wait(max(0.0, ends_at - time.monotonic()))
                except subprocess.TimeoutExpired:
                    killed.append(name)
        self.close()
        return killed

    def close(self) -> None:
        """Kills all that runs."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _run(self, container: Resource) -> None:
        program, *words = container["command"]
        with (self._directory / f"{self._ordinal}-{container['name']}.log").open("ab") as log:
            self._processes[container["name"]] = subprocess.Popen(
                [str(_BIN / program), *(self._here(word, container) for word in words)],
                env={**os.environ, **{one["name"]: one["value"] for one in container.get("env", ())}},
                stdout=log,
                stderr=log,
            )

    def _wait(self, container: Resource, kind: str) -> None:
        name = container["name"]
        while not self.probe(container, kind):
            assert self._processes[name].poll() is None, self.log(name)[-3000:]
            time.sleep(0.1)

    def _here(self, word: str, container: Resource) -> str:
        """Puts the folder in place of each mount, and the pod's address in place of the network's."""
        for mount in container["volumeMounts"]:
            if mount["mountPath"] not in _HOSTS:
                word = word.replace(mount["mountPath"], str(self._folder(mount["name"])))
        word = word.replace("/opt/slipstream/bundled", str(target_dir().parent))
        return word.replace("0.0.0.0", self.ip).replace("127.0.0.1", self.ip)

    def _folder(self, volume: str) -> Path:
        """A claim's folder is the same at each start, any other one is new; both are as a kubelet makes them."""
        name = f"{volume}-{self._ordinal}" if volume in self._claims else f"{volume}-{self._ordinal}-{self._num_starts}"
        folder: Any = self._directory / name
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o2777)
        return Path(folder)
