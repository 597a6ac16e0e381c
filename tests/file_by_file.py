"""`pytest -p tests.file_by_file -n 3 --dist loadfile`: each file is collected by the process that runs it, not by all.

pytest-xdist lets every process import all test files and make all tests, to agree on a list. Here that list has one
entry per file; the process that gets one collects the file and runs its tests. Long files come first: one that begins
last is waited for by all other processes. Reports and selections by `-m` and `-k` are as without this plugin; one test
that is named on the command line turns it off.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# Files that take longest, the longest first, but those of tests/web together.
LONG_FILES = Path(__file__).with_name("long_files.txt").read_text(encoding="utf-8").split()
ORDER = {name: place for place, name in enumerate(LONG_FILES)}


class WholeFile(pytest.Item):
    """The entry of a file in the list that all processes have."""

    def runtest(self) -> None:
        raise NotImplementedError  # its tests are run instead


class UncollectedFile(pytest.File):
    def collect(self) -> Iterator[WholeFile]:
        yield WholeFile.from_parent(self, name="whole file")

    def tests(self) -> list[pytest.Item]:
        """Collects the file now: what `pytest --collect-only` would list of it."""
        module = pytest.Module.from_parent(self.parent, path=self.path)
        num_modules = len(sys.modules)
        gc.disable()
        try:
            items = list(self.session.genitems(module))
            if len(sys.modules) > num_modules + 200:  # PyTorch, JAX: a million objects that live until the end
                gc.collect()
                gc.freeze()
        finally:
            gc.enable()
        self.config.hook.pytest_collection_modifyitems(session=self.session, config=self.config, items=items)
        return items


class FileByFile:
    """In a process that runs tests."""

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> UncollectedFile:
        return UncollectedFile.from_parent(parent, path=module_path)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, Any, Any]:
        """Selections are made among the tests of a file, not among files."""
        files = [item for item in items if isinstance(item, WholeFile)]
        items[:] = [item for item in items if not isinstance(item, WholeFile)]
        result = yield
        items.extend(sorted(files, key=lambda file: ORDER.get(file.nodeid.partition("::")[0], len(ORDER))))
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not isinstance(item, WholeFile):
            return None
        assert isinstance(item.parent, UncollectedFile)
        session, tests = item.session, item.parent.tests()
        if not tests:  # no teardown of one leaves what the next file does not share
            session._setupstate.teardown_exact(nextitem)
        place = session.items.index(item)
        for test, following in zip(tests, [*tests, nextitem][1:], strict=True):
            session.items[place] = test  # where pytest-xdist looks for the test that it gets a report of
            test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        session.items[place] = item
        return True


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]
    """A process has the file that it runs and the one that comes next: it needs to know which fixtures go on."""

    def _reschedule(self, node: WorkerController) -> None:
        if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


class HandsFilesOut:
    """In the process that starts the others."""

    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput["file_by_file"] = True

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> FileScheduling:
        return FileScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if "file_by_file" in getattr(config, "workerinput", {}):
        config.pluginmanager.register(FileByFile())
    elif config.getoption("dist") == "loadfile" and not any("::" in each for each in config.args):
        config.pluginmanager.register(HandsFilesOut())
