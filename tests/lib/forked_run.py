"""Starts `tune run` in a process that is forked from a server which has imported the run's modules.

Most of a short run's time goes into the imports of its driver, which are the same for all tests.
The command's own start is tried where a test asks for a new interpreter.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from multiprocessing import forkserver
from unittest import mock

_PROCESSES = multiprocessing.get_context("forkserver")
_SERVER = forkserver.ForkServer()  # other tests have one of their own, with other modules
_SERVER.set_forkserver_preload(["torchtune._cli.tune", "grpo_components.config.objective"])
"""No preloaded module may import Ray, which reads its settings from the environment only once."""
_NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
"""Keeps pyarrow's allocator and numpy from starting threads when they are imported."""
_BELOW_TESTS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


class ForkedRun:
    """Has what tests use of a `subprocess.Popen`, with stderr in stdout."""

    def __init__(self, command, *, cwd, env):
        with mock.patch.dict(os.environ, _NO_THREAD):
            _SERVER.ensure_running()
        reading, writing = _PROCESSES.Pipe(duplex=False)
        self.stdout = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        given = (list(map(str, command)), writing, str(cwd), env)
        self._process = _PROCESSES.Process(target=_become, args=given)
        with mock.patch.object(
            forkserver, "connect_to_new_process", _SERVER.connect_to_new_process
        ):
            self._process.start()
        reading.close()
        writing.close()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    returncode = property(poll)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout):
        """Read the run's output to the end; kill the run after `timeout` seconds."""
        timer = threading.Timer(timeout, self.send_signal, [signal.SIGKILL])
        timer.start()
        output = self.stdout.read()
        self._process.join(timeout)
        timer.cancel()
        self.stdout.close()
        return output, None


def _become(command, output, cwd, env):
    gc.freeze()  # a collection would look at all that was imported
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    given = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    installed = [folder for folder in sys.path if not folder.startswith(_BELOW_TESTS)]
    sys.path[:] = [os.path.dirname(command[0]), *given, *installed]
    sys.argv = command
    del sys.modules[__name__]  # a run saves what is imported from outside the packages
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
