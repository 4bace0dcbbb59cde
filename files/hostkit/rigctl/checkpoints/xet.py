"""Child process: write a file's bytes to standard output by the hub's chunked transfer. The request comes as JSON on
standard input. Run by the builder: libraries that read what the hub's storage sends, as nobody in particular.
"""

import json
import sys

from rigctl.checkpoints.http import server_of
from rigctl.checkpoints.hub import client


def main() -> int:
    """Send the file from the request's offset on; a failure is one line on stderr."""
    request = json.load(sys.stdin)
    endpoint, route, token = request["endpoint"], request["refresh_route"], request["token"]
    hub = client(endpoint)
    # After the client's environment is set.
    from hf_xet import XetFileInfo, XetSession  # type: ignore[import-untyped]  # noqa: PLC0415  # has no types; see above
    from huggingface_hub.utils import _xet, build_hf_headers  # noqa: PLC0415  # see above

    try:
        # The address for further tokens of the storage is the endpoint's word, and may be elsewhere.
        headers = build_hf_headers(token=(server_of(route) == server_of(endpoint) and token) or False)
        data = _xet.XetFileData(file_hash=request["file_hash"], refresh_route=route)
        info = _xet.refresh_xet_connection_info(file_data=data, headers=headers)
        group = XetSession().new_download_stream_group(
            endpoint=info.endpoint,
            token=info.access_token,
            token_expiry_unix_secs=info.expiration_unix_epoch,
            token_refresh_url=route,
            token_refresh_headers=headers,
            custom_headers=_xet.xet_headers_without_auth(headers),
        )
        file = XetFileInfo(request["file_hash"], request["size"])
        for block in group.download_stream(file, start=request["offset"]):
            sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()
    except (OSError, ValueError, RuntimeError, hub.errors.HfHubHTTPError) as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
