"""The signals that stop a server."""

import asyncio
import signal


def watch_stop_signals() -> asyncio.Future[signal.Signals]:
    """Install handlers for SIGTERM, SIGINT and SIGHUP.

    After SIGTERM or SIGINT, the next one of them has its default action, which ends the process at once. A hang-up never does: a shell
    and the kernel both send SIGHUP when a terminal closes, and systemd sends it right after SIGTERM (``SendSIGHUP=``). A process that
    was started with SIGHUP ignored, as by nohup, keeps ignoring it.
    """
    loop = asyncio.get_running_loop()
    first_signal: asyncio.Future[signal.Signals] = loop.create_future()
    termination_signals = (signal.SIGTERM, signal.SIGINT)

    def stop(received_signal: signal.Signals) -> None:
        if not first_signal.done():
            first_signal.set_result(received_signal)
        if received_signal in termination_signals:
            for termination_signal in termination_signals:
                loop.remove_signal_handler(termination_signal)

    for termination_signal in termination_signals:
        loop.add_signal_handler(termination_signal, stop, termination_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop, signal.SIGHUP)
    return first_signal
