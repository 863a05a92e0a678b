"""A client of a served bundle on another host: prints the status of a request, and the answer, as JSON. Needs no torch."""

import json
import sys
from urllib.error import HTTPError, URLError
from urllib.request import urlopen


def main(address: str, *ids: str) -> None:
    tensor = {"name": "ids", "shape": [len(ids)], "datatype": "INT64", "data": list(map(int, ids))}
    body = json.dumps({"inputs": [tensor]}).encode()
    try:
        with urlopen(f"http://{address}/v2/models/layers/infer", body, timeout=10) as response:
            outcome = {"status": response.status, "data": json.load(response)["outputs"][0]["data"]}
    except HTTPError as error:
        outcome = {"status": error.code, "error": error.read().decode()}
    except (URLError, OSError) as error:
        outcome = {"status": 0, "error": str(error)}
    sys.stdout.write(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
