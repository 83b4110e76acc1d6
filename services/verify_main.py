"""`slipstream-verify`: the verify service."""

from slipstream.common.rpc.service_options import run_command
from slipstream.services.command_line import verify


def main() -> None:
    run_command(verify)


if __name__ == "__main__":
    main()
