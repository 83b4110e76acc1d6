"""Makes the dashboards' JSON.

python -m slipstream.deploy.grafana.build
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from slipstream.deploy.grafana.health import HEALTH
from slipstream.deploy.grafana.overlap import OVERLAP
from slipstream.deploy.grafana.service import SERVICE
from slipstream.deploy.grafana.speculation import SPECULATION

FOLDER = Path(__file__).resolve().parent / "dashboards"


def texts() -> dict[str, str]:
    """Returns the content of each file in `FOLDER`, by its name."""
    return {
        f"{board.uid}.json": json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for board in (OVERLAP, SPECULATION, SERVICE, HEALTH)
    }


def main() -> None:
    """Writes the files."""
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
