"""Child process: fetch one file with the hub client's own transfer. The request comes as JSON on stdin."""

import json
import sys

from rigctl.checkpoints.hub import client


def main() -> int:
    """Fetch the file into the request's directory; a failure is one line on stderr."""
    request = json.load(sys.stdin)
    try:
        client(request["endpoint"]).hf_hub_download(
            request["repository"],
            request["path"],
            revision=request["revision"],
            endpoint=request["endpoint"],
            token=request["token"] or False,
            local_dir=request["directory"],
        )
    except Exception as error:  # any failure means the same to the parent: fetch it by http
        print(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
