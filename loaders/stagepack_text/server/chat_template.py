"""Conversations as the text that a model continues."""

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from stagepack_loaders.python_process import module_command, module_environment
from stagepack_serving.server.errors import BadRequestError
from stagepack_text.server.tool_calls import form_of_template

_PROCESS_MODULE: Final = "stagepack_text.server.template_process"
_MAX_SECONDS: Final = 10.0


class ChatTemplate:
    """The template of a bundle, which is filled in by a process of its own; see `template_process`.

    Some bundles have a second template, for conversations with tools.

    Attributes:
        call_form: how the model writes calls of tools; None if the template teaches none, or another form than those that are read.

    The process starts with the first conversation, and again after one that it did not survive.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str], tool_template: str | None = None) -> None:
        self._template = template
        self._tool_template = template if tool_template is None else tool_template
        self.call_form = form_of_template(self._tool_template)
        self._special_tokens = dict(special_tokens)
        self._process: subprocess.Popen[bytes] | None = None
        # A thread of its own: conversations that wait for it take none of other models, and are dropped when their clients go away.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stagepack-chat-template")

    async def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Write a conversation as a text, which ends where the answer of the assistant begins."""
        template = self._tool_template if tools else self._template
        if "developer" not in template:  # OpenAI's newer name of that role
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
            ]
        variables = {**self._special_tokens, "messages": messages, "add_generation_prompt": True}
        variables |= {"tools": list(tools)} if tools else {}
        request = {"template": template, "variables": variables}
        answer_line = await asyncio.get_running_loop().run_in_executor(self._thread, self._exchange, request)
        if not answer_line:
            raise BadRequestError("the chat template of the bundle took too much time or memory")
        try:
            answer = msgspec.json.decode(answer_line, type=dict[str, str])
        except msgspec.DecodeError:
            raise BadRequestError("the chat template of the bundle writes lone surrogates, which are no text") from None
        if "error" in answer:
            raise BadRequestError(f"the chat template of the bundle refuses the messages: {answer['error']}")
        return answer["text"]

    def close(self) -> None:
        """End the process, after the conversation that it fills in."""
        self._thread.shutdown(cancel_futures=True)
        self._end_process()

    def _exchange(self, request: Mapping[str, Any]) -> bytes:
        """Send a request to the process, and return its answer; empty if it does not survive it."""
        # Fields of messages that are JSON already may have lines.
        line = msgspec.json.encode(request).replace(b"\n", b" ") + b"\n"
        if self._process is not None and self._process.poll() is not None:  # it was killed while it had nothing to do
            self._end_process()
        self._process = process = self._process or _start_process()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(_MAX_SECONDS, process.kill)
        timer.start()
        answer_line = b""
        try:
            with contextlib.suppress(OSError):
                process.stdin.write(line)
                process.stdin.flush()
                answer_line = process.stdout.readline()
        finally:
            timer.cancel()
            if not answer_line.endswith(b"\n"):
                answer_line = b""
                self._end_process()
        return answer_line

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):  # of a line that it has not read
                self._process.communicate()
            self._process = None


def _start_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own module
        module_command(_PROCESS_MODULE),
        env=module_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the server
    )
