"""Messages between the server and the processes of hosts: agents, movers and workers."""
