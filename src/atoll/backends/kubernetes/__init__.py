"""The backend of a cluster: ranks as the pods of an Indexed Job."""
