"""A server with those endpoints of the Hugging Face Hub that pushing and pulling a bundle needs, for one repository.

Written from what huggingface_hub sends. Files are on a second host, to which the hub redirects, as on the real one.
"""

import base64
import hashlib
import json
import threading
from pathlib import Path
from typing import Any, Self

from flask import Flask, Response, redirect, request
from werkzeug.serving import make_server

from tests.remote.http_server import HttpServer

REPOSITORY = "org/tiny-stagepack"
TOKEN = "hf_testing"  # noqa: S105 - of no account


class HubServer:
    """The hub, while it is used as a context.

    Attributes:
        files: the content of the repository's files, by commit and path; the last commit is that of the branch main.
        content_host: the host that the hub redirects to.
    """

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.content_host = HttpServer(folder)
        self._folder = folder
        self._uploads: dict[str, bytes] = {}
        self._server = make_server("127.0.0.1", 0, self._application(), threaded=True)

    def __enter__(self) -> Self:
        self.content_host.__enter__()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.content_host.__exit__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def head(self) -> str:
        return list(self.files)[-1]

    def commit(self, files: dict[str, bytes]) -> str:
        """Make a commit; return its id."""
        commit_id = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()
        self.files[commit_id] = files
        for path, content in files.items():
            target = self._folder / commit_id / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return commit_id

    def _application(self) -> Flask:
        app = Flask("hub")
        self._add_repository(app)
        self._add_uploads(app)

        @app.before_request
        def authorize() -> Response | None:
            is_upload = request.path.startswith("/uploads/")  # by URLs that are secrets themselves
            authorized = request.headers.get("Authorization") == f"Bearer {TOKEN}"
            return None if authorized or is_upload else Response("Invalid credentials", 401)

        return app

    def _add_repository(self, app: Flask) -> None:
        """Add the endpoints that read the repository, and the one that creates it."""
        api = f"/api/models/{REPOSITORY}"

        @app.post("/api/repos/create")
        def create() -> Any:
            if self.files:
                answer = {"error": "You already created this model repo", "url": f"{self.url}/{REPOSITORY}"}
                return Response(json.dumps(answer), 409)
            self.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
            return {"url": f"{self.url}/{REPOSITORY}"}

        @app.get(api)
        @app.get(f"{api}/revision/<revision>")
        def info(revision: str = "main") -> Any:
            commit_id = self.head if revision == "main" else revision
            if commit_id not in self.files:
                return Response("{}", 404, {"X-Error-Code": "RevisionNotFound"})
            return {"id": REPOSITORY, "sha": commit_id, "tags": [], "siblings": []}

        @app.get(f"/{REPOSITORY}/resolve/<commit_id>/<path:path>")
        def resolve(commit_id: str, path: str) -> Any:
            if path not in self.files[commit_id]:
                return Response("Entry not found", 404, {"X-Error-Code": "EntryNotFound"})
            return redirect(f"{self.content_host.url}/{commit_id}/{path}?signature=secret")

        @app.get(f"{api}/tree/main")
        @app.get(f"{api}/tree/main/<path:folder>")
        def tree(folder: str = "") -> Any:
            prefix = f"{folder}/" if folder else ""
            found = {path: content for path, content in self.files[self.head].items() if path.startswith(prefix)}
            if folder and not found:
                return Response("{}", 404, {"X-Error-Code": "EntryNotFound"})
            return [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha256(content).hexdigest()}
                for path, content in found.items()
                if "/" not in path.removeprefix(prefix)
            ]

    def _add_uploads(self, app: Flask) -> None:
        """Add the endpoints of a commit."""
        api = f"/api/models/{REPOSITORY}"

        @app.post("/api/validate-yaml")
        def validate() -> Any:
            assert request.json["content"].startswith("---\nlibrary_name: stagepack\n")
            return {"errors": [], "warnings": []}

        @app.post(f"{api}/preupload/main")
        def preupload() -> Any:
            modes = {True: "lfs", False: "regular"}
            return {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": modes[file["path"].endswith(".safetensors")],
                        "shouldIgnore": False,
                    }
                    for file in request.json["files"]
                ]
            }

        @app.post(f"/{REPOSITORY}.git/info/lfs/objects/batch")
        def batch() -> Any:
            objects = [
                {**entry, "actions": {"upload": {"href": f"{self.url}/uploads/{entry['oid']}"}}}
                for entry in request.get_json(force=True)["objects"]
            ]
            return {"transfer": "basic", "objects": objects}

        @app.put("/uploads/<oid>")
        def upload(oid: str) -> str:
            content = request.get_data()
            assert hashlib.sha256(content).hexdigest() == oid
            self._uploads[oid] = content
            return ""

        @app.post(f"{api}/commit/main")
        def commit() -> Any:
            files = dict(self.files[self.head])
            for line in request.get_data().splitlines():
                operation = json.loads(line)
                value = operation["value"]
                match operation["key"]:
                    case "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    case "lfsFile":
                        files[value["path"]] = self._uploads[value["oid"]]
                    case "deletedFile":
                        del files[value["path"]]
            commit_id = self.commit(files)
            return {"commitUrl": f"{self.url}/{REPOSITORY}/commit/{commit_id}", "commitOid": commit_id}
