from swarm_ft.api.calls import RunningCoordinator as RunningCoordinator
from swarm_ft.api.calls import RunningPeer as RunningPeer
from swarm_ft.api.calls import coordinate as coordinate
from swarm_ft.api.calls import coordinate_async as coordinate_async
from swarm_ft.api.calls import serve as serve
from swarm_ft.api.calls import serve_async as serve_async
from swarm_ft.api.calls import train as train
from swarm_ft.api.calls import train_async as train_async
from swarm_ft.api.listening import Listening as Listening
from swarm_ft.api.local_swarm import LocalSwarm as LocalSwarm
from swarm_ft.api.peer_home import BufferOptions as BufferOptions
from swarm_ft.client.report import RunReport as RunReport
from swarm_ft.coordinator.facts.quotas import Quotas as Quotas
from swarm_ft.errors import SwarmError as SwarmError

__version__: str
