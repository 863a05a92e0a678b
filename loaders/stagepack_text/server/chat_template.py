"""Conversations as the text that a model continues."""

import asyncio
import contextlib
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from stagepack_loaders.python_process import module_command, module_environment
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus
from stagepack_text.server.tool_calls import form_of_template

_PROCESS_MODULE: Final = "stagepack_text.server.template_process"
_MAX_SECONDS: Final = 10.0
# Conversations that are filled in at once, each by a process: one that hangs does not hold the others.
_MOST_PROCESSES: Final = 4
# What ends a process that a template does not end: its own limits raise other signals and errors.
_SIGNALS_FROM_OUTSIDE: Final = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})


class ChatTemplate:
    """The template of a bundle, which processes of its own fill in; see `template_process`.

    Some bundles have a second template, for conversations with tools.

    Attributes:
        call_form: how the model writes calls of tools; None if the template teaches none, or another form than those that are read.

    A process starts with the first conversation, with one that comes while the others are at work, and after one that it did not survive.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str], tool_template: str | None = None) -> None:
        self._template = template
        self._tool_template = template if tool_template is None else tool_template
        self.call_form = form_of_template(self._tool_template)
        self._special_tokens = dict(special_tokens)
        # Processes that no conversation uses.
        self._processes: list[subprocess.Popen[bytes]] = []
        # Threads of its own: conversations that wait for them take none of other models, and are dropped when their clients go away.
        self._threads = ThreadPoolExecutor(_MOST_PROCESSES, thread_name_prefix="stagepack-chat-template")
        weakref.finalize(self, _end_processes, self._processes)

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
        answer_line = await asyncio.get_running_loop().run_in_executor(self._threads, self._exchange, request)
        try:
            answer = msgspec.json.decode(answer_line, type=dict[str, str])
        except msgspec.DecodeError:
            raise BadRequestError("the chat template of the bundle writes lone surrogates, which are no text") from None
        if "error" in answer:
            raise BadRequestError(f"the chat template of the bundle refuses the messages: {answer['error']}")
        return answer["text"]

    def close(self) -> None:
        """End the processes, after the conversations that they fill in."""
        self._threads.shutdown(cancel_futures=True)
        _end_processes(self._processes)

    def _exchange(self, request: Mapping[str, Any]) -> bytes:
        """Send a request to a process, and return its answer."""
        # Fields of messages that are JSON already may have lines.
        line = msgspec.json.encode(request).replace(b"\n", b" ") + b"\n"
        process = self._take_process()
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
            if answer_line.endswith(b"\n"):
                self._processes.append(process)
            else:
                _end_process(process)
        if not answer_line.endswith(b"\n"):
            raise _lost_error(process)
        return answer_line

    def _take_process(self) -> "subprocess.Popen[bytes]":
        """A process that waits for a conversation, or a new one."""
        while True:
            try:
                process = self._processes.pop()
            except IndexError:
                break
            if process.poll() is None:
                return process
            _end_process(process)  # it was killed while it had nothing to do
        try:
            return _start_process()
        except OSError as error:
            message = f"the process that fills in the chat template of the bundle cannot start: {error}: try again"
            raise RequestError(RequestStatus.STAGE_LOST, message) from None


def _lost_error(process: "subprocess.Popen[bytes]") -> RequestError:
    """Why a process that has ended has given no answer."""
    if process.returncode in _SIGNALS_FROM_OUTSIDE:
        message = f"the process that fills in the chat template of the bundle was killed, or hung for {_MAX_SECONDS:.0f} s: try again"
        return RequestError(RequestStatus.STAGE_LOST, message)
    return BadRequestError("the chat template of the bundle took too much time or memory")


def _end_processes(processes: "list[subprocess.Popen[bytes]]") -> None:
    while processes:
        _end_process(processes.pop())


def _end_process(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with contextlib.suppress(OSError):  # of a line that it has not read
        process.communicate()


def _start_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own module
        module_command(_PROCESS_MODULE),
        env=module_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the server
    )
