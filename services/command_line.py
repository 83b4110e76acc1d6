"""The commands `slipstream-draft` and `slipstream-verify`. Light until the address is claimed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from slipstream.common.rpc import service_options
from slipstream.common.rpc.service_options import ServiceOptions
from slipstream.common.settings import with_options
from slipstream.common.wire.step import Role
from slipstream.services.worker.config import ONLY_DRAFT, ONLY_VERIFY, WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slipstream.common.rpc.listener import Listener
    from slipstream.services.worker.server import MakeRole


def serve(role: Role, values: Mapping[str, Any], *, make_role: MakeRole | None = None) -> NoReturn:
    """Claims the address, then loads the model and serves.

    `values`: the options of the command line. `make_role`: loads something else in place of the model, on the thread
    that owns the device.
    """

    def run(config: WorkerConfig, listener: Listener, options: ServiceOptions) -> int:
        import uvloop

        from slipstream.services.factory import make_draft, make_verify
        from slipstream.services.worker.crew import started_crew
        from slipstream.services.worker.server import run_worker

        with started_crew(config, options) as crew:
            make = make_role or (make_draft if role is Role.DRAFT else partial(make_verify, crew=crew))
            place = options.metrics_port, options.metrics_host
            return uvloop.run(run_worker(role, config, listener, *place, make, crew=crew))

    service_options.serve(role.value, WorkerConfig, values, run)


@with_options(WorkerConfig, ServiceOptions, without=ONLY_VERIFY)
def draft(**values: Any) -> None:
    """Serves a draft model, which proposes tokens."""
    serve(Role.DRAFT, values)


@with_options(WorkerConfig, ServiceOptions, without=ONLY_DRAFT)
def verify(**values: Any) -> None:
    """Serves the target model, which checks what a draft proposes."""
    serve(Role.VERIFY, values)
