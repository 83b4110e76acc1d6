"""Makes the dashboards' JSON.

python -m slipstream.deploy.grafana.build
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from slipstream.deploy.grafana.health import health
from slipstream.deploy.grafana.overlap import overlap
from slipstream.deploy.grafana.service import service
from slipstream.deploy.grafana.speculation import speculation

FOLDER = Path(__file__).resolve().parent / "dashboards"


def texts() -> dict[str, str]:
    """Returns the content of each file in `FOLDER`, by its name."""
    boards = (overlap(), speculation(), service(), health())
    return {
        f"{board.uid}.json": json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for board in boards
    }


def main() -> None:
    """Writes the files."""
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
