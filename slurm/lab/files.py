"""The configuration files of a test cluster, as text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Lab:
    """One test cluster: a folder that holds everything of it, and a range of ports."""

    folder: Path
    base_port: int = 17000
    """slurmctld's port; the nodes have the next ones, MariaDB and slurmdbd the base plus 98 and 99."""
    nodes: int = 2
    cpus: int = 4
    """Cores that each node claims to have, whatever the machine has."""
    gpus: int = 2
    """Fake GPUs of each node."""
    accounting: bool = False
    """With slurmdbd, so that sacct works."""
    user: str = "root"

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def socket(self) -> Path:
        """munge's socket."""
        return self.folder / "munge" / "socket"

    @property
    def conf(self) -> Path:
        """slurm.conf; what SLURM_CONF names."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def database_port(self) -> int:
        """MariaDB's port."""
        return self.base_port + 98

    @property
    def accounting_port(self) -> int:
        """slurmdbd's port."""
        return self.base_port + 99

    def port_of(self, node: str) -> int:
        """The port of a node's slurmd."""
        return self.base_port + 1 + self.names.index(node)


def slurm_conf(lab: Lab) -> str:
    """slurm.conf: loopback only, quick to notice a lost node, quick to run a requeued job again."""
    f = lab.folder
    # A requeued job waits until its old credential has expired: 120 s unless told otherwise.
    authentication = f"socket={lab.socket},cred_expire=5"
    return f"""\
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={lab.base_port}
# Jobs derive ports from their ids: those of two clusters must not meet.
FirstJobId={lab.base_port % 10000 + 1}
SlurmUser={lab.user}
SlurmdUser={lab.user}
AuthType=auth/munge
AuthInfo={authentication}
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny

StateSaveLocation={f}/state
SlurmdSpoolDir={f}/spool/%n
SlurmctldPidFile={f}/run/slurmctld.pid
SlurmdPidFile={f}/run/slurmd.%n.pid
SlurmctldLogFile={f}/log/slurmctld.log
SlurmdLogFile={f}/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MailProg=/bin/true

MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
{_accounting(lab)}

SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=5
KillWait=30
InactiveLimit=0
MinJobAge=600
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
{"GresTypes=gpu" if lab.gpus else ""}
{_nodes(lab)}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


def _accounting(lab: Lab) -> str:
    if not lab.accounting:
        return f"""\
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={lab.folder}/log/jobcomp.txt"""
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={lab.accounting_port}
AccountingStoragePass={lab.socket}
AccountingStorageTRES=gres/gpu"""


def _nodes(lab: Lab) -> str:
    gpus = f" Gres=gpu:h100:{lab.gpus}" if lab.gpus else ""
    return "\n".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={lab.port_of(name)} "
        f"CPUs={lab.cpus} SocketsPerBoard=1 CoresPerSocket={lab.cpus} ThreadsPerCore=1 RealMemory=4000{gpus} "
        "State=UNKNOWN"
        for name in lab.names
    )


def gres_conf(lab: Lab) -> str:
    """gres.conf: the fake GPUs' device files; SLURM numbers GPUs by the digits at the end of the names."""
    if not lab.gpus:
        return ""
    return f"NodeName=node[1-{lab.nodes}] Name=gpu Type=h100 File={lab.folder}/dev/nvidia[0-{lab.gpus - 1}]\n"


def hosts(lab: Lab, own_name: str) -> str:
    """What each node has for /etc/hosts, so that the nodes' names resolve there."""
    return f"127.0.0.1 localhost {own_name} {' '.join(lab.names)}\n"


def slurmdbd_conf(lab: Lab) -> str:
    """slurmdbd.conf; holds the database's password and must be readable by its owner alone."""
    f = lab.folder
    return f"""\
AuthType=auth/munge
AuthInfo={lab.socket}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={lab.accounting_port}
SlurmUser={lab.user}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={lab.database_port}
StorageUser=slurm
StoragePass=lab
PidFile={f}/run/slurmdbd.pid
LogFile={f}/log/slurmdbd.log
CommunicationParameters=NoInAddrAny
"""


DATABASE_SQL = """\
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'lab';
CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED BY 'lab';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost';
"""
