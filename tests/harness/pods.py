"""Runs a pod of a rendered StatefulSet as processes of this host: a small part of what a kubelet does.

It starts each container's command with its env, its volumes as folders and its ports at an address of its own; sidecars
first, each when the startup probe of the one before it passes; runs the probes as they are written; and ends the pod as
a kubelet does: preStop, SIGTERM, the sidecars after the containers in reverse order, and SIGKILL after the grace.

With `Images` a container is its image: its root, read-only, with the pod's volumes, /dev/shm and /tmp in it, its user
and its variables. Without, it is the programs and models of this tree, run by the test's user, with this host's
/dev/shm and /tmp.

It does none of this: limits of memory, namespaces of processes and networks, restarts of containers, endpoints of
Services, claims of devices.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock
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
_IN_IMAGE = """
root=$1 user=$2
shift 2
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
  mkdir -p "$root$2"
  mount --bind "$1" "$root$2"
  shift 2
done
shift
mount -o remount,bind,ro "$root"
exec chroot --userspec="$user" "$root" env -i "$@"
"""
"""The script of a container, in mounts of its own: ROOT USER [FOLDER PATH]... -- [NAME=VALUE]... COMMAND."""


class Images:
    """Images of buildah, as root of this host: a working container of each, which is removed with the context."""

    def __init__(self) -> None:
        self._containers: dict[str, str] = {}
        self._lock = Lock()  # pods start at the same time

    def __enter__(self) -> Images:
        """Nothing is made before an image is used."""
        return self

    def __exit__(self, *_: object) -> None:
        """Removes what was made."""
        for container in self._containers.values():
            _buildah("rm", container)

    def command(self, image: str, mounts: dict[str, Path], env: dict[str, str], words: list[str]) -> list[str]:
        """Returns the command that runs `words` in an image with folders at the paths that `mounts` has."""
        with self._lock:
            if image not in self._containers:
                self._containers[image] = _buildah("from", "--pull-never", f"localhost/{image}")
            container = self._containers[image]
        config = json.loads(_buildah("inspect", container))["OCIv1"]["config"]
        places = [part for path, folder in mounts.items() for part in (str(folder), path)]
        variables = [*config["Env"], f"HOME={config['WorkingDir']}", *(f"{name}={env[name]}" for name in env)]
        script = ["unshare", "--mount", "sh", "-e", "-c", _IN_IMAGE, image]
        return [*script, _buildah("mount", container), config["User"], *places, "--", *variables, *words]


def _buildah(*words: str) -> str:
    return subprocess.run(("buildah", *words), check=True, capture_output=True, text=True).stdout.strip()


class Pod:
    """A pod of the StatefulSet, by its ordinal. Blocks its callers."""

    def __init__(self, statefulset: Resource, ordinal: int, directory: Path, images: Images | None = None) -> None:
        """`directory` keeps its claims. Nothing runs before `start`."""
        self._images = images
        self._spec = statefulset["spec"]["template"]["spec"]
        self._claims = {claim["metadata"]["name"] for claim in statefulset["spec"]["volumeClaimTemplates"]}
        self._hosts = {one["name"]: Path(one["hostPath"]["path"]) for one in self._spec["volumes"] if "hostPath" in one}
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
                command, env = self._command(container, probe["exec"]["command"])
                return subprocess.run(command, env=env, timeout=timeout_s, capture_output=True).returncode == 0
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
        command, env = self._command(container, container["command"])
        with (self._directory / f"{self._ordinal}-{container['name']}.log").open("ab") as log:
            self._processes[container["name"]] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def _command(self, container: Resource, words: list[str]) -> tuple[list[str], dict[str, str]]:
        """Returns a command of a container as one of this host, and its environment."""
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        env = {one["name"]: one["value"] for one in container.get("env", ())}
        words = [word.replace("0.0.0.0", self.ip).replace("127.0.0.1", self.ip) for word in words]
        if self._images is not None:
            folders = {path: self._folder(name) for path, name in mounts.items()}
            return self._images.command(container["image"], folders, env, words), dict(os.environ)
        places = {path: self._folder(name) for path, name in mounts.items() if path not in _HOSTS}
        places["/opt/slipstream/bundled"] = target_dir().parent
        for path, folder in places.items():
            words = [word.replace(path, str(folder)) for word in words]
        return words, {**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}", **env}

    def _wait(self, container: Resource, kind: str) -> None:
        name = container["name"]
        while not self.probe(container, kind):
            assert self._processes[name].poll() is None, self.log(name)[-3000:]
            time.sleep(container[kind]["periodSeconds"] / 10)

    def _folder(self, volume: str) -> Path:
        """A claim's folder is the same at each start, any other one is new; both are as a kubelet makes them."""
        if (path := self._hosts.get(volume)) is not None:
            return path
        name = f"{volume}-{self._ordinal}" if volume in self._claims else f"{volume}-{self._ordinal}-{self._num_starts}"
        folder: Any = self._directory / name
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o2777)
        return Path(folder)
