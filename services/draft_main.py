"""`slipstream-draft`: the draft service."""

from slipstream.common.rpc.service_options import run_command
from slipstream.services.command_line import draft


def main() -> None:
    run_command(draft)


if __name__ == "__main__":
    main()
