"""The settings of a door process."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.common.errors import ConfigError
from slipstream.common.rpc.access import AccessSettings, check_internal
from slipstream.common.settings import Settings, duration, setting
from slipstream.door.parsers import REASONING_FORMS, TOOL_FORMS

GATEWAY = "127.0.0.1:50051"
NOT_OF_A_DOOR = ("api_keys", "key_streams", "key_tokens", "max_calls", "reflection")
"""Settings of access that are the gateway's."""


@dataclass(frozen=True, kw_only=True)
class FormSettings(Settings, heading="OpenAI's interface"):
    """The door's settings that `slipstream up` has, too, and passes on."""

    tool_call_parser: str = setting(
        "auto",
        help="Form of calls of tools in the model's output; auto: that of the chat template.",
        choices=("auto", "none", *TOOL_FORMS),
    )
    reasoning_parser: str = setting(
        "auto",
        help="Form of thoughts in the model's output; auto: that of the chat template.",
        choices=("auto", "none", *REASONING_FORMS),
    )


@dataclass(frozen=True, kw_only=True)
class DoorConfig(FormSettings, AccessSettings, heading="Door"):
    """The settings of a door. Checked when it is built; the command line takes its options from here."""

    gateway: str = setting(GATEWAY, help="Address of the gateway, whose client the door is.", unit="ADDRESS")
    asks_for_keys: bool = setting(False, help="Refuse callers without an API key; the gateway checks the key.")
    workers: int = setting(1, help="Doors that share the port; another process holds it.", unit="N", low=1, high=64)
    private_listen: str | None = setting(
        None, help="A second address, unix:PATH, without TLS, for health checks of this user.", unit="ADDRESS"
    )
    read_timeout_s: float = duration(
        30.0, help="Time for a request to arrive, and in which a client must read something of its stream."
    )
    reconnect_s: float = duration(75.0, help="Time for which the door waits for a gateway that went away.")
    grace_s: float = duration(30.0, help="After the first SIGTERM, running requests may take this long.")

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field."""
        super().__post_init__()
        if self.private_listen is not None:
            check_internal(self.private_listen, field="private_listen")
        for name in NOT_OF_A_DOOR:
            if getattr(self, name) != getattr(type(self), name):
                raise ConfigError(name, getattr(self, name), "none: it is a setting of the gateway")

    @property
    def shares_port(self) -> bool:
        return self.workers > 1
