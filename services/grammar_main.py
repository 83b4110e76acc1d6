"""`slipstream-grammar`: the grammar worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.common.errors import ConfigError
from slipstream.common.rpc import service_options
from slipstream.common.rpc.service_options import ServiceOptions, run_command
from slipstream.common.settings import with_options
from slipstream.services.grammar.config import GrammarConfig

if TYPE_CHECKING:
    from slipstream.common.rpc.listener import Listener


@with_options(GrammarConfig, ServiceOptions)
def grammar(**values: Any) -> None:
    """Serves the grammar worker, which makes the masks of requests with constraints."""

    def run(config: GrammarConfig, listener: Listener, options: ServiceOptions) -> int:
        import uvloop

        try:
            from slipstream.services.grammar.server import run_grammar_worker
        except ModuleNotFoundError as error:
            accepted = "an installation of it: pip install slipstream-serve[constraints]"
            raise ConfigError("llguidance", str(error), accepted) from None
        return uvloop.run(run_grammar_worker(config, listener, options.metrics_port, options.metrics_host))

    service_options.serve("grammar", GrammarConfig, values, run)


def main() -> None:
    run_command(grammar)


if __name__ == "__main__":
    main()
