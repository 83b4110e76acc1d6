"""How often and how soon a service that has died is started again."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.common.settings import Settings, setting

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 10.0


@dataclass(frozen=True, kw_only=True)
class RestartSettings(Settings, heading="Restarts"):
    """When `up` starts a service again, and when it gives up."""

    max_restarts: int = setting(
        5,
        help="Restarts of a service within --restart-window-s; with the next death `up` ends. A draft waits for room.",
        unit="N",
        low=0,
        high=1_000_000,
    )
    restart_window_s: float = setting(
        300.0, help="Time in which the restarts are counted.", unit="SECONDS", above=0, high=86400
    )
    hang_timeout_s: float = setting(
        10.0,
        help="A service that answers no health check for so long is killed and started again.",
        unit="SECONDS",
        above=0,
        high=86400,
    )


@dataclass(slots=True)
class RestartRecord:
    """When a service was started again."""

    settings: RestartSettings
    times: list[float] = field(default_factory=list)
    """Moments of the restarts, on time.monotonic's clock."""

    def recent(self, now: float) -> list[float]:
        """The restarts within the window."""
        return [at for at in self.times if now - at < self.settings.restart_window_s]

    def is_used_up(self, now: float) -> bool:
        """True if no further restart is allowed now."""
        return len(self.recent(now)) >= self.settings.max_restarts

    def due(self, now: float) -> float:
        """Returns when it may be started again: at once, after growing pauses, and when the window has room."""
        recent, most = self.recent(now), self.settings.max_restarts
        if len(recent) >= most:
            return (recent[-most] if most else now) + self.settings.restart_window_s
        return now + min(_FIRST_PAUSE_S * 2 ** min(len(recent) - 1, 10), _MAX_PAUSE_S) if recent else now

    def add(self, now: float) -> None:
        """Counts a restart."""
        self.times = [*self.recent(now), now]
