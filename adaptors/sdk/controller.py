"""`mindio_ttp.controller_ttp`: the controller's functions of the SDK, with the documented names, parameters and errors.

Two callers: rank 0 of a framework that calls the SDK (`rank` 0 or more), and the launcher of MindCluster, TaskD (`rank`
-1), which also takes part in recoveries: it registers four callbacks, and gives orders with tft_notify_controller_*.

How ranks find the controller: in a job of ttprun, or of another launcher, through the job's store; under MindCluster by
address, with the keys of a file that both sides read (TFT_KEYS).
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mindio_tft_patch import logs
from mindio_tft_patch.adaptors.sdk import checks, tls_info
from mindio_tft_patch.adaptors.sdk.manager import ACTIONS, CallbackManager
from mindio_tft_patch.config import Config, read_config
from mindio_tft_patch.controller.events import Choose, FaultyRanks, Order, PauseTraining, SaveAndExit, StopTraining
from mindio_tft_patch.controller.server import ControllerServer
from mindio_tft_patch.errors import ConfigError, ControlError, TftError
from mindio_tft_patch.protocol import endpoint
from mindio_tft_patch.protocol.keys import keys_in_file, read_keys

log = logging.getLogger("mindio_tft_patch.sdk")

LAUNCHER = -1  # the `rank` of a cluster manager's launcher
GLOBAL_SECONDS = (1, 3600)
_NOT_OFFERED = ("downgrade", "upgrade", "migration")  # of the documented strategies
_PREPARATIONS = ("hot switch", "stop switch")


class Face:
    """What the functions below work on; one per process."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._callbacks: dict[str, Callable[..., Any]] = {}
        self._config: Config | None = None
        self._rank = LAUNCHER
        self._restarts = False
        self._server: ControllerServer | None = None
        self._manager: CallbackManager | None = None
        self._store: Any = None  # under a launcher that hosts none, this process serves the job's store

    def init(self, rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool, enable_zit: bool) -> None:
        """tft_init_controller."""
        call = "tft_init_controller"
        size = checks.world_size(call, world_size)
        checks.rank(call, rank, size, lowest=LAUNCHER)
        switches = {"enable_local_copy": enable_local_copy, "enable_arf": enable_arf, "enable_zit": enable_zit}
        for name, value in switches.items():
            checks.switch(call, name, value)
        if self._config is not None:
            log.info("%s: the controller is initialised already; this call changes nothing", call)
            return
        config = replace(read_config([], self._environ), rank=max(rank, 0), world_size=size)
        if config.mindspore and (enable_local_copy or enable_zit):
            raise ConfigError(f"{call}: no local copies and no ZIT under MindSpore.", change="Pass False for both.")
        if rank == LAUNCHER:
            logs.configure(config, role="launcher")
        if enable_zit:
            log.warning("%s: enable_zit=True has no effect: training with fewer ranks is not supported", call)
        self._config, self._rank, self._restarts = config, rank, enable_arf

    def start(self, bind_ip: str, port: int, enable_tls: bool, tls: str) -> None:
        """tft_start_controller."""
        call = "tft_start_controller"
        address = checks.address(call, "bind_ip", bind_ip)
        checks.port(call, port)
        checks.switch(call, "enable_tls", enable_tls)
        if self._config is None:
            raise ConfigError(f"{call}: the controller is not initialised.", change="Call tft_init_controller first.")
        tls_info.demand(call, self._config, enable_tls, tls)
        if self._rank != LAUNCHER and self._config.controller_external:
            log.info("%s: the controller of this job runs in its launcher; nothing is started here", call)
            return
        if self._rank > 0:
            log.info("%s: the controller of this job runs in rank 0; there are none in reserve", call)
            return
        if self._server is not None:
            raise ConfigError(f"{call}: the controller runs already.", change="Call tft_destroy_controller first.")
        config = replace(self._config, controller_bind=address, controller_address=self._reached_at(address), port=port)
        self._open(call, config, enable_tls)
        self._attach()

    def _reached_at(self, address: str) -> str:
        """PROCESSOR_ADDR may differ from what is bound, behind the service of a cluster."""
        return self._config.controller_address if self._config and self._environ.get("PROCESSOR_ADDR") else address

    def _open(self, call: str, config: Config, enable_tls: bool) -> None:
        alone = self._rank == LAUNCHER
        if alone:
            keys = keys_in_file(config)
            if keys is None and enable_tls:
                raise ConfigError(
                    f"{call}: enable_tls=True, and there are no keys.",
                    change="Write some with `mindio-tft keys FILE` and set TFT_KEYS, or pass enable_tls=False.",
                )
            config = replace(config, encrypted=keys is not None)
        else:
            keys = read_keys(config.keys_path) if config.keys_path is not None and config.encrypted else None
        server = ControllerServer(config, config.world_size, keys=keys, restarts=self._restarts)
        place = server.start()
        self._server = server
        if not alone:
            self._publish(config, place)

    def _publish(self, config: Config, place: endpoint.Endpoint) -> None:
        from mindio_tft_patch.adaptors.job_store import open_job_store

        try:
            self._store = open_job_store(config)
            endpoint.publish(self._store, place)
        except BaseException:
            self.destroy()
            raise

    def register(self, action: str, func: Callable[..., Any]) -> int:
        """tft_register_mindx_callback."""
        if action not in ACTIONS:
            log.error("tft_register_mindx_callback: action is %r; it is one of %s", action, ", ".join(ACTIONS))
            return 1
        if not callable(func):
            log.error("tft_register_mindx_callback: func of %s cannot be called: %r", action, func)
            return 1
        self._callbacks[action] = func
        self._attach()
        return 0

    def _attach(self) -> None:
        """A cluster manager takes part when it has registered all it can be told with."""
        if self._server is None or self._manager is not None or len(self._callbacks) < len(ACTIONS):
            return
        self._manager = CallbackManager(self._callbacks, self._server.order)
        self._manager.start()
        self._server.attach(self._manager)
        log.info("a cluster manager takes part in recoveries")

    def order(self, call: str, order: Order) -> int:
        """One of the functions tft_notify_controller_*: 0, or 1 and a reason in the log."""
        if self._server is None:
            log.error("%s: the controller does not run in this process", call)
            return 1
        answer = self._server.order(order)
        if not answer.obeyed:
            log.error("%s: not obeyed: %s", call, answer.reason)
        return 0 if answer.obeyed else 1

    @property
    def registered(self) -> bool:
        """Ranks have registered: they have high availability switched on."""
        return self._server is not None and self._server.registered() > 0

    def destroy(self) -> None:
        """tft_destroy_controller."""
        server, manager = self._server, self._manager
        self._server = self._manager = self._config = self._store = None
        if server is not None:
            server.close()
        if manager is not None:
            manager.close()


_FACE = Face()
atexit.register(_FACE.destroy)


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Prepare the controller of this job.

    Args:
        rank: -1 (a cluster manager's launcher) to world_size - 1.
        world_size: ranks of the job, 1 to 100000.
        enable_local_copy: checked, not used: a step is either complete or not begun (docs/how-it-works.md).
        enable_arf: processes may be started anew.
        enable_zit: no effect: training with fewer ranks is not supported.

    Raises:
        ConfigError: a parameter that cannot be.
    """
    _logged("tft_init_controller", lambda: _FACE.init(rank, world_size, enable_local_copy, enable_arf, enable_zit))


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Start the controller; nothing is started under ttprun, whose launcher runs it, and by a rank other than 0.

    Args:
        bind_ip: address or name of this node; no all-zero address.
        port: 1024 to 65535.
        enable_tls: refuse a control channel that is not encrypted.
        tls_info: certificates of the original; checked, not used.

    Raises:
        ConfigError: a parameter that cannot be, or a call out of order.
        ControlError: the address or port cannot be used.
    """
    _logged("tft_start_controller", lambda: _FACE.start(bind_ip, port, enable_tls, tls_info))


def tft_destroy_controller() -> None:
    """End the controller. Does nothing without one."""
    _logged("tft_destroy_controller", _FACE.destroy)


def tft_query_high_availability_switch() -> bool:
    """Have ranks registered, that is, does the job have high availability switched on?"""
    return _FACE.registered


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """Register one of the cluster manager's callbacks; with all four it takes part in recoveries.

    They are called on a thread of their own, one at a time, with

        report_fault_ranks(error_rank_dict)                            these ranks have a fault
        report_stop_complete(code, msg, error_rank_dict)               0 all have stopped; 400, 403, 404 not
        report_strategies(error_rank_dict, strategy_list)              of retry, recover, dump, exit
        report_result(code, msg, error_rank_dict, curr_strategy)       0 good; 405, 406, 499 what else is possible

    Args:
        action: a name of these.
        func: replaces one that was registered before.

    Returns:
        0, or 1 when action or func cannot be.
    """
    return _FACE.register(action, func)


def tft_notify_controller_stop_train(
    fault_ranks: Mapping[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """Stop training, because these ranks are faulty; or let it hold between two steps.

    Args:
        fault_ranks: rank -> 0 memory error, 1 other fault (2 broken communication). Not used by a pause.
        stop_type: "stop" or "pause".
        timeout: of a pause: seconds after which training goes on by itself.

    Returns:
        0, or 1 when that is not possible now.
    """
    call = "tft_notify_controller_stop_train"
    if stop_type == "stop":
        return _ordered(call, lambda: StopTraining(_ranks(call, fault_ranks)))
    if stop_type != "pause":
        log.error('%s: stop_type is %r; it is "stop" or "pause"', call, stop_type)
        return 1
    return _ordered(call, lambda: PauseTraining(_seconds(call, timeout)))


def tft_notify_controller_on_global_rank(fault_ranks: Mapping[int, int], time: int = 1) -> int:
    """These are all ranks that are faulty, in the view of the whole cluster.

    Args:
        fault_ranks: rank -> 0 memory error, 1 other fault: its process is ended and another one is started.
        time: seconds that the choice of a strategy may take, 1 to 3600; MINDIO_WAIT_MINDX_TIME if that is longer.

    Returns:
        0, or 1 when that is not possible now.
    """
    call = "tft_notify_controller_on_global_rank"
    return _ordered(
        call, lambda: FaultyRanks(_ranks(call, fault_ranks), checks.integer(call, "time", time, *GLOBAL_SECONDS))
    )


def tft_notify_controller_prepare_action(action: str, fault_ranks: Mapping[int, int] | None = None) -> int:
    """Replace a node that is about to fail ("hot switch", "stop switch"): not supported.

    Returns:
        1.
    """
    known = "is not supported" if action in _PREPARATIONS else f"is none of {', '.join(_PREPARATIONS)}"
    log.error("tft_notify_controller_prepare_action: %r %s", action, known)
    return 1


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """Carry out a strategy, one of those that were reported; or go on after a pause.

    Args:
        strategy: retry, recover, dump, exit, continue. Not supported: downgrade, upgrade, migration.
        params: not used; it belongs to what is not supported.

    Returns:
        0, or 1 when that is not possible now.
    """
    call = "tft_notify_controller_change_strategy"
    if strategy in _NOT_OFFERED:
        log.error("%s: %s is not supported", call, strategy)
        return 1
    return _ordered(call, lambda: Choose(strategy))


def tft_notify_controller_dump() -> int:
    """Write a checkpoint and end the job.

    Returns:
        0, or 1 when the job is ending already.
    """
    return _ordered("tft_notify_controller_dump", SaveAndExit)


def _logged(call: str, function: Callable[[], None]) -> None:
    """The documents promise both: an error in the log, and an exception."""
    try:
        function()
    except (TftError, OSError) as problem:
        log.error("%s", problem)
        if isinstance(problem, OSError):
            raise ControlError(f"{call}: {problem}") from problem
        raise


def _ordered(call: str, make: Callable[[], Order]) -> int:
    try:
        order = make()
    except ConfigError as problem:
        log.error("%s", problem)
        return 1
    return _FACE.order(call, order)


def _ranks(call: str, value: Any) -> dict[int, int]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{call}: fault_ranks is {value!r}.", change="Pass a dict of rank to type of fault.")
    return {
        checks.integer(call, "a rank of fault_ranks", rank, 0, checks.WORLD_SIZE_MAX): checks.integer(
            call, f"the type of rank {rank}", kind, 0, 2
        )
        for rank, kind in value.items()
    }


def _seconds(call: str, value: Any) -> float | None:
    return None if value is None else float(checks.integer(call, "timeout", value, 0, 10**9))
