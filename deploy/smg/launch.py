#!/usr/bin/env python3
"""Runs SMG as `smg launch` does, without its banner, and with the key of its callers in the variable SMG_API_KEY."""

import os
import sys

from smg import launch_router

if __name__ == "__main__":
    launch_router.print_banner = lambda *_: None
    arguments = launch_router.parse_router_args(sys.argv[1:])
    arguments.api_key = arguments.api_key or os.environ.get("SMG_API_KEY")
    launch_router.launch_router(arguments)
