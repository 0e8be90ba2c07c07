"""Ends with 0 if a URL answers 200 within 3 s, else with 1: python healthcheck.py URL."""

import sys
import urllib.request


def main(url: str) -> int:
    """The exit code."""
    # A proxy of the environment is not for a container's own port.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=3) as answer:
            return 0 if answer.status == 200 else 1
    except (OSError, ValueError) as failure:
        print(f"{url}: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
