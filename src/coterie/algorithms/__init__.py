"""The methods, one file each; importing this package lists them all."""

from coterie.algorithms.blend import Blend
from coterie.algorithms.census import Census
from coterie.algorithms.cfl import CFL
from coterie.algorithms.clove import CLoVE
from coterie.algorithms.ditto import Ditto
from coterie.algorithms.fedala import FedALA
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedem import FedEM
from coterie.algorithms.federated_cmeans import FederatedCMeans
from coterie.algorithms.federated_kmeans import FederatedKMeans
from coterie.algorithms.fedgem import FedGEM
from coterie.algorithms.fedgmi import FedGMI
from coterie.algorithms.fedgmm import FedGMM
from coterie.algorithms.fedpac import FedPAC
from coterie.algorithms.fedproto import FedProto
from coterie.algorithms.fedprox import FedProx
from coterie.algorithms.fedsoft import FedSoft
from coterie.algorithms.fesem import FeSEM
from coterie.algorithms.flexcfl import FlexCFL
from coterie.algorithms.ifca import IFCA
from coterie.algorithms.kfed import KFed
from coterie.algorithms.local_only import LocalOnly
from coterie.algorithms.mosaic import Mosaic
from coterie.algorithms.oneshot import OneShot
from coterie.algorithms.pacfl import PACFL
from coterie.algorithms.per_fedavg import PerFedAvg
from coterie.algorithms.survey import Survey

__all__ = [
    "CFL",
    "IFCA",
    "PACFL",
    "Blend",
    "CLoVE",
    "Census",
    "Ditto",
    "FeSEM",
    "FedALA",
    "FedAvg",
    "FedEM",
    "FedGEM",
    "FedGMI",
    "FedGMM",
    "FedPAC",
    "FedProto",
    "FedProx",
    "FedSoft",
    "FederatedCMeans",
    "FederatedKMeans",
    "FlexCFL",
    "KFed",
    "LocalOnly",
    "Mosaic",
    "OneShot",
    "PerFedAvg",
    "Survey",
]
